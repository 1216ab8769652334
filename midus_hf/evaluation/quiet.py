"""Libraries that keep to themselves what nobody needs to read: advice, chatter and their progress bars."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

from midus_hf.library_bars import without_library_bars


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide warnings, logs below errors, transformers' bars and what is printed on standard output.

    Errors that are raised or logged come through, and so do downloads' bars on standard error.
    """
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
    """Hide all that is written to standard error, such as bars that cannot be turned off, but errors that are logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logging.root.addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.root.removeHandler(handler)
