"""What cannot be read, and the words of other libraries for it."""

import importlib.util
from types import ModuleType


class DocumentError(ValueError):
    """Text that cannot be read, or that there is too little of."""


def first_line(error: Exception) -> str:
    """What another library says, without what follows its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def import_datasets(wanted_by: str) -> ModuleType:
    """Import the package `datasets`, which is an extra.

    Args:
        wanted_by: What cannot be read without it, for the message.

    Raises:
        DocumentError: If it is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DocumentError(f"{wanted_by} needs the package datasets; install it with pip install datasets.")
    import datasets

    return datasets
