"""Bars, ours and those of libraries, on terminals, elsewhere a line each minute; and other output."""

import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

from midus_hf.config.errors import is_main_process

_SECONDS_PER_LINE = 60.0  # between two lines of progress where standard error is no terminal
_UP = "\x1b[A"  # moves the cursor of a terminal up


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
    """Stream for bars without a terminal: a line each minute, and all other text if `keeps_text`."""

    def __init__(self, stream: TextIO, keeps_text: bool):
        self._stream, self._keeps_text = stream, keeps_text
        self._shown_at, self._is_drawing = time.monotonic(), False

    def write(self, text: str) -> int:
        """Drop a bar (after a carriage return), its line's end and cursor moves, unless a minute has passed."""
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
    """Return a bar of tqdm in the first process of a run, without a terminal a line each minute."""
    stream = sys.stderr if sys.stderr.isatty() else _BarLines(sys.stderr, keeps_text=False)
    return tqdm(iterable, file=stream, disable=not is_main_process(), **settings)


def limit_bars() -> contextlib.AbstractContextManager[Any]:
    """Let bars of libraries print a line each minute in the context, if standard error is no terminal."""
    if sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(_BarLines(sys.stderr, keeps_text=True))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide bars of transformers in the context, and print on standard error what libraries print; show all else."""
    with contextlib.redirect_stdout(sys.stderr), without_library_bars():
        yield
