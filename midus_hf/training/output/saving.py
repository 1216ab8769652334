"""Keep what was trained if it cannot be written to the output, mostly because a disk is full."""

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


# Parts of the error messages of `torch.save`; the last one occurs if only the end of a file did not fit.
_OF_A_FILE_CUT_SHORT = ("inline_container", "PytorchStreamWriter", "iostream error")


class SaveError(RuntimeError):
    """Error of a run whose model could not be written anywhere."""


def say(line: str) -> None:
    """Print a line on standard error, above a progress bar if there is one; only the main process prints.

    Args:
        line: Text of the line.
    """
    if PartialState().is_main_process:
        tqdm.write(line, file=sys.stderr)


def write_failure(error: BaseException) -> str | None:
    """Return the system's reason why a file could not be written; None if the error is of another kind.

    Args:
        error: Error that saving a model or an optimizer raised.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if isinstance(error, SafetensorError) and "I/O error" in text:
        return text.partition("I/O error: ")[2] or text
    if type(error) is Exception and "(os error " in text:  # raised by tokenizers
        return text.partition(" (os error ")[0]
    # torch.save reports only that its file was cut short, and not why.
    if isinstance(error, RuntimeError) and any(message_part in text for message_part in _OF_A_FILE_CUT_SHORT):
        return "a file could not be written to its end"
    return None


def save_where_possible(
    write: Callable[[Path], None],
    output: Path,
    output_on_failure: Path | None,
    num_bytes: int,
    waiting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Path:
    """Write to the output or, if that fails, to another folder that has room.

    The folders are tried in this order: the output; then `output_on_failure` or, without it, a new folder among the
    system's temporary files if `num_bytes` fit there. If all fail and a user sits at the terminal of a single process,
    the user is asked to make room, and the output is tried again on Enter, or as soon as there is room.

    All processes call this, with the same arguments.

    Args:
        write: Creates a folder and writes to it; all processes call this function, perhaps several times. After a
            failure it removes the files that it wrote.
        output: Folder that is tried first.
        output_on_failure: Folder that is tried next; None for the system's folder for temporary files.
        num_bytes: Number of bytes that are written.
        waiting: Returns a context that the program enters while it waits for the user. Default: a context that does
            nothing.

    Returns:
        The folder that was written.

    Raises:
        SaveError: If no folder could be written; the message gives the reason for each folder.
    """
    state = PartialState()
    failures: list[str] = []
    places = _places(output, output_on_failure, num_bytes, failures, waiting)
    while True:
        next_folder = [next(places, None) if state.is_main_process else None]
        broadcast_object_list(next_folder)
        folder = next_folder[0]
        if folder is None:
            reasons = ["; ".join(failures)]
            broadcast_object_list(reasons)
            raise SaveError(reasons[0])
        failure = None
        try:
            write(folder)
        except Exception as error:
            failure = write_failure(error)
            if failure is None:
                raise
        outcome = [failure]
        broadcast_object_list(outcome)
        if outcome[0] is None:
            return folder
        failures.append(f"{folder}: {outcome[0]}")


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
    """Wait for Enter, or for room on the disk; return false if standard input ends or the deadline passes."""
    while time.monotonic() < deadline:
        readable, _, _ = select.select([sys.stdin], [], [], _SECONDS_BETWEEN_TRIES)
        if readable:
            return sys.stdin.readline() != ""
        if free_bytes(output) > num_bytes:
            return True
    return False
