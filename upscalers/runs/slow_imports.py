"""Imports that take seconds: torch, transformers and the classes of midus_hf."""

import contextlib

from upscalers.request.errors import RequestError, one_line


def import_slow_modules() -> None:
    """Import the modules that checking a result needs.

    Raises:
        RequestError: If they cannot be imported, for example because memory is short.
    """
    try:
        import upscalers.runs.streamed_model  # noqa: F401 - brings torch, transformers and the classes of midus_hf
    except (ImportError, OSError, MemoryError) as error:
        raise RequestError(
            f"torch and transformers cannot be loaded ({type(error).__name__}: {one_line(error)}). Make room in memory or raise "
            "the limit on it (ulimit -v); if it is not that, install midus-hf again."
        ) from None


def import_early() -> None:
    """Import slow modules while bytes are copied, so that checking can begin at once; a failure is left to the first use."""
    with contextlib.suppress(RequestError):
        import_slow_modules()
