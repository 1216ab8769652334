"""The bars that transformers and the Hub's client show for every file that they load or save."""

import contextlib
import sys
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def without_library_bars() -> Iterator[None]:
    """Hide them within."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def library_bars_on_terminals() -> contextlib.AbstractContextManager[None]:
    """Hide them within where standard error, to which they are written, is no terminal."""
    return contextlib.nullcontext() if sys.stderr.isatty() else without_library_bars()
