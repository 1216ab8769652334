"""The bars that transformers, the Hub's client and `datasets` show for every file that they load or save."""

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


@contextlib.contextmanager
def data_bars_on_terminals() -> Iterator[None]:
    """Hide the bars of `datasets` within where standard error is no terminal."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
