"""Contexts that hide the output of libraries: warnings, logs and progress bars."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

from midus_hf.library_bars import without_library_bars


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
