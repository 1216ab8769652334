"""What libraries print: the bars that they show for every file that they load or save, warnings and logs."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def without_library_bars() -> Iterator[None]:
    """Hide them within."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide warnings, logs below errors, progress bars of transformers and all standard output within the context."""
    before = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            with without_library_bars():
                yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide standard error, such as progress bars that cannot be turned off, within the context. Logged errors still appear."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logging.root.addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.root.removeHandler(handler)
