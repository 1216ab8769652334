"""Bars, ours and those of libraries: drawn on terminals, elsewhere a line each minute. And what else libraries print."""

import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

# Between two lines of progress where standard error is no terminal.
_SECONDS_PER_LINE = 60.0
# Moves the cursor of a terminal up.
_UP = "\x1b[A"


@contextlib.contextmanager
def without_library_bars() -> Iterator[None]:
    """Hide the bars that transformers shows for every file that it loads or saves, within the context."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class _BarLines(io.TextIOBase):
    """Stream for bars without a terminal: passes on a line of them each minute, and all other text if `keeps_text`."""

    def __init__(self, stream: TextIO, keeps_text: bool):
        self._stream, self._keeps_text = stream, keeps_text
        self._shown_at, self._is_drawing = time.monotonic(), False

    def write(self, text: str) -> int:
        """Drop a bar, which begins with a carriage return, unless a minute has passed, and the end of its line.

        Bars below others move the cursor by line breaks and upwards, which is dropped too.
        """
        if _UP in text or (len(text) > 1 and not text.strip("\n")):
            return len(text)
        if text.startswith("\r"):
            self._is_drawing = True
            if text.strip() and time.monotonic() - self._shown_at >= _SECONDS_PER_LINE:
                self._shown_at = time.monotonic()
                self._stream.write(f"{text.strip()}\n")
                self._stream.flush()
        elif self._keeps_text and not (self._is_drawing and text == "\n"):
            self._is_drawing = False
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def show_progress(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm:
    """Return a bar of tqdm, drawn on a terminal and elsewhere a line each minute, in the first process of a run."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    stream = sys.stderr if sys.stderr.isatty() else _BarLines(sys.stderr, keeps_text=False)
    return tqdm(iterable, file=stream, disable=not is_first, **settings)


def limit_bars() -> contextlib.AbstractContextManager[Any]:
    """Let the bars of libraries print a line each minute within the context, where standard error is no terminal."""
    if sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(_BarLines(sys.stderr, keeps_text=True))


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
def only_bars() -> Iterator[None]:
    """Hide standard error within the context, except for logged errors and a line of bars each minute; terminals get everything."""
    if sys.stderr.isatty():
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logging.root.addHandler(handler)
    try:
        with contextlib.redirect_stderr(_BarLines(sys.stderr, keeps_text=False)):
            yield
    finally:
        logging.root.removeHandler(handler)
