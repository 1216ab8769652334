"""Bars, ours and those of libraries, on terminals, elsewhere a line each minute; and other output."""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

from midus_hf.config.errors import is_main_process

_SECONDS_PER_LINE = 60.0  # between two lines of progress where standard error is no terminal
# Messages of libraries that evaluations hide, by logger and by how they begin. All others reach the person.
_HIDDEN_LOGS = {
    # The harness says that it was given a loaded model, which is how it is always called here.
    "lm_eval.models.huggingface": ("`pretrained` model kwarg is not of type", "Passed an already-initialized model"),
}
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
        self._stream = stream
        self._keeps_text = keeps_text
        self._shown_at = time.monotonic()
        self._is_drawing = False

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
    """Hide bars of transformers and `_HIDDEN_LOGS` in the context; what libraries print goes to standard error."""
    hidden = {logging.getLogger(name): _Without(beginnings) for name, beginnings in _HIDDEN_LOGS.items()}
    for logger, without in hidden.items():
        logger.addFilter(without)
    try:
        with contextlib.redirect_stdout(sys.stderr), without_library_bars():  # standard output is for results
            yield
    finally:
        for logger, without in hidden.items():
            logger.removeFilter(without)


class _Without(logging.Filter):
    """Filter of messages that begin with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]):
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is shown."""
        return not record.getMessage().startswith(self._beginnings)
