"""Keep what was trained when it cannot be written where it should be: on a full disk, above all."""

import contextlib
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from tqdm import tqdm

from midus_hf.training.output.disk_room import free_bytes

_SECONDS_BETWEEN_TRIES = 30
_SECONDS_TO_WAIT = 24 * 3600


_OF_A_FILE_CUT_SHORT = ("inline_container", "PytorchStreamWriter", "iostream error")
"""Words of the errors that `torch.save` raises; the last comes where only the end of a file did not fit."""


class SaveError(RuntimeError):
    """What was trained could be written nowhere."""


def say(line: str) -> None:
    """Tell people something on standard error, above a progress bar if there is one; the main process alone does.

    Args:
        line: What to tell.
    """
    if PartialState().is_main_process:
        tqdm.write(line, file=sys.stderr)


def write_failure(error: BaseException) -> str | None:
    """What the system says of a file that could not be written; None if the error is of another kind.

    Args:
        error: What saving a model or an optimizer raised.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if isinstance(error, SafetensorError) and "I/O error" in text:
        return text.partition("I/O error: ")[2] or text
    if type(error) is Exception and "(os error " in text:  # of tokenizers
        return text.partition(" (os error ")[0]
    # torch.save knows only that its file was cut short.
    if isinstance(error, RuntimeError) and any(words in text for words in _OF_A_FILE_CUT_SHORT):
        return "a file could not be written to its end"
    return None


def save_where_possible(
    write: Callable[[Path], None],
    output: Path,
    output_on_failure: Path | None,
    num_bytes: int,
    waiting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Path:
    """Write to the output or, should that fail, where there is room.

    Tried in this order: the output; `output_on_failure` or, without it, a new folder in the system's folder for
    temporary files if `num_bytes` fit there. If nothing takes it and a person sits at the terminal of a single process,
    they are asked to make room, and the output is tried again on Enter, or as soon as there is room.

    All processes call it, with the same arguments.

    Args:
        write: Writes to a folder, which it creates; all processes call it. What it leaves there when it fails, it
            removes itself. It may be called several times.
        output: The first folder.
        output_on_failure: The second; None for the system's folder for temporary files.
        num_bytes: Bytes that are written.
        waiting: Made a context manager while a person is waited for.

    Returns:
        The folder that has it.

    Raises:
        SaveError: If none has; the message says why, place by place.
    """
    state = PartialState()
    failures: list[str] = []
    places = _places(output, output_on_failure, num_bytes, failures, waiting)
    while True:
        chosen = [next(places, None) if state.is_main_process else None]
        broadcast_object_list(chosen)
        place = chosen[0]
        if place is None:
            reasons = ["; ".join(failures)]
            broadcast_object_list(reasons)
            raise SaveError(reasons[0])
        failure = None
        try:
            write(place)
        except Exception as error:
            failure = write_failure(error)
            if failure is None:
                raise
        outcome = [failure]
        broadcast_object_list(outcome)
        if outcome[0] is None:
            return place
        failures.append(f"{place}: {outcome[0]}")


def _places(
    output: Path,
    output_on_failure: Path | None,
    num_bytes: int,
    failures: list[str],
    waiting: Callable[[], contextlib.AbstractContextManager],
) -> Iterator[Path]:
    yield output
    say(f"{failures[-1]}. What was trained is still in memory; trying elsewhere.")
    if output_on_failure is not None:
        yield output_on_failure
    elif free_bytes(tempfile.gettempdir()) > num_bytes:
        folder = Path(tempfile.mkdtemp(prefix=f"{output.name}-"))
        yield folder
        with contextlib.suppress(OSError):
            folder.rmdir()
    else:
        failures.append(f"{tempfile.gettempdir()}: no room for {num_bytes:,} bytes")
    if PartialState().num_processes == 1 and sys.stdin.isatty() and sys.stderr.isatty():
        deadline = time.monotonic() + _SECONDS_TO_WAIT
        while time.monotonic() < deadline:
            say(
                f"{failures[-1]}. Make room for {num_bytes:,} bytes in {output}, then press Enter; Ctrl-C gives up what "
                "was trained."
            )
            with waiting():
                if not _wait_for_room(output, num_bytes, deadline):
                    return
            yield output


def _wait_for_room(output: Path, num_bytes: int, deadline: float) -> bool:
    """Wait for Enter, or for room on the disk; false if neither can come any more."""
    while time.monotonic() < deadline:
        readable, _, _ = select.select([sys.stdin], [], [], _SECONDS_BETWEEN_TRIES)
        if readable:
            return sys.stdin.readline() != ""
        if free_bytes(output) > num_bytes:
            return True
    return False
