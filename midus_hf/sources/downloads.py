"""Downloads that break: an error in one sentence, and a line while the Hub says nothing."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from midus_hf.config.errors import first_line, print_note

_SECONDS_OF_SILENCE = 60.0  # after which a line says that the Hub does not answer
_watched = threading.Lock()  # held where a context watches requests, so that contexts in it do not

# Errors of connections, by the modules that define them. A module that was not imported has raised none.
_CONNECTION_ERRORS = {
    "httpx": ("TransportError",),
    "httpx2": ("TransportError",),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "urllib3.exceptions": ("TimeoutError", "ProtocolError", "NewConnectionError", "MaxRetryError"),
    "aiohttp.client_exceptions": ("ClientConnectionError", "ClientPayloadError"),
    "fsspec.exceptions": ("FSTimeoutError",),
}


class DownloadError(Exception):
    """Error of a download whose connection broke; `facts`: what was being fetched, and how. Commands end with status 1."""

    def __init__(self, facts: str):
        super().__init__(f"{facts}. Files that have come whole are kept: run the command again to fetch the rest.")
        self.facts = facts


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that the libraries for HTTP that are imported raise of a connection."""
    loaded = [(sys.modules[name], classes) for name, classes in _CONNECTION_ERRORS.items() if name in sys.modules]
    return tuple(getattr(module, each) for module, classes in loaded for each in classes)


def as_download_error(error: BaseException, name: str | None = None) -> DownloadError | None:
    """Return the error about a connection that broke, or None for an error of another kind.

    Args:
        error: The exception. It may be the consequence of the one of the connection.
        name: What was being fetched. Default: the file of the request, if it is known, or else the host.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DownloadError):  # which is not raised from its own consequence
            return link if link is error else DownloadError(link.facts)
        if isinstance(link, connection_errors()):
            what = name or _fetched(link)
            reason = f"{type(link).__name__}: {first_line(link).removesuffix('.')}"
            return DownloadError(f"the connection broke while {what} was being fetched ({reason})")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


@contextlib.contextmanager
def fetching(name: str) -> Iterator[None]:
    """Raise `DownloadError` if a connection breaks in the context; print a line if the Hub is silent.

    Args:
        name: What is fetched, as messages name it.
    """
    try:
        with _noting_silence(name):
            yield
    except Exception as error:
        told = as_download_error(error, name)
        if told is None or told is error:
            raise
        raise told from error


@contextlib.contextmanager
def _noting_silence(name: str) -> Iterator[None]:
    """Print a line if a request of huggingface_hub's client is not answered for a minute in the context."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    hooks = get_session().event_hooks
    if constants.HF_HUB_OFFLINE or not _watched.acquire(blocking=False):
        yield
        return
    waiting = dict[int, tuple[str, float]]()  # by thread: the address that it asked, and since when
    has_ended = threading.Event()

    def begin(request: Any) -> None:
        thread = threading.get_ident()
        address = str(request.url)
        if thread not in waiting or waiting[thread][0] != address:  # a request that is repeated goes on
            waiting[thread] = (address, time.monotonic())

    def end(response: Any) -> None:
        waiting.pop(threading.get_ident(), None)

    def watch() -> None:
        while not has_ended.wait(_SECONDS_OF_SILENCE / 10):
            frames = sys._current_frames()
            asked = [*waiting.items()]
            since = min((begun for thread, (_, begun) in asked if _is_asking(frames.get(thread))), default=math.inf)
            if time.monotonic() - since >= _SECONDS_OF_SILENCE:
                print_note(f"{name}: the Hub has not answered for {_SECONDS_OF_SILENCE:.0f} s. Still waiting")
                return

    watcher = threading.Thread(target=watch, daemon=True)
    hooks["request"].append(begin)
    hooks["response"].append(end)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()
        hooks["request"].remove(begin)
        hooks["response"].remove(end)
        _watched.release()


def _is_asking(frame: Any) -> bool:
    """Return whether a thread is within huggingface_hub, which it leaves when a request fails for good."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "huggingface_hub":
            return True
        frame = frame.f_back
    return False


def _fetched(error: BaseException) -> str:
    """Return what the request of an error was for: a file of a repository, something at a host, or data."""
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # of httpx, where there is none
        request = None
    address = urlsplit(str(getattr(request, "url", "")))
    repository, _, inner = address.path.lstrip("/").partition("/resolve/")
    if inner:
        return f"{unquote(inner.partition('/')[2])} of {repository}"
    return f"something from {address.hostname}" if address.hostname else "something from the network"
