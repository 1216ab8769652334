"""The error for documents that cannot be read, and how it quotes other libraries."""

import importlib.util
from types import ModuleType


class DocumentError(ValueError):
    """Error for text that cannot be read, or for a corpus with too little text."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the error's type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def import_datasets(wanted_by: str) -> ModuleType:
    """Import the optional package `datasets`.

    Args:
        wanted_by: What needs the package, for the error message.

    Raises:
        DocumentError: If the package is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DocumentError(f"{wanted_by} needs the package datasets; install it with pip install datasets.")
    import datasets

    return datasets
