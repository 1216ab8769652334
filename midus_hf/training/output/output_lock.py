"""A run that is alive holds its output: no other process trains into the same folder."""

import time
import weakref
from pathlib import Path

from midus_config.locks import Lock, has_no_locks, lock_or_warn

_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
"""Of the outputs that runs of this process hold."""

_TRIES, _SECONDS_BETWEEN = 20, 0.05


def hold_output(output: Path) -> Lock | None:
    """Hold the output of a run until the lock is released, forgotten, or the process ends; one process of a run does.

    A process trains once at a time: a run that was prepared and not ended in it gives way to its next one.

    Args:
        output: A folder.

    Returns:
        The lock. None where the file system has no locks: there nobody is refused.

    Raises:
        ValueError: If another process holds it.
        OSError: If there is no such folder, or locking it fails.
    """
    mine = _lock_of_this_process(output)
    if mine is not None:
        return mine
    for _ in range(_TRIES):
        try:
            lock = lock_or_warn(output, output)
        except BlockingIOError:
            time.sleep(_SECONDS_BETWEEN)  # who only looks has it for a moment (`check_not_held`)
        else:
            if lock is not None:
                _HELD.add(lock)
            return lock
    raise ValueError(_refusal(output))


def check_not_held(output: Path) -> None:
    """See that no other process holds an output; all processes of a run may look, before one of them holds it.

    Args:
        output: A folder; it need not exist.

    Raises:
        ValueError: If one does.
    """
    if _lock_of_this_process(output) is not None:
        return
    try:
        Lock(output, shared=True).release()
    except BlockingIOError:
        raise ValueError(_refusal(output)) from None
    except FileNotFoundError:
        return
    except OSError as error:
        if not has_no_locks(error):
            raise


def _lock_of_this_process(output: Path) -> Lock | None:
    return next((lock for lock in _HELD if lock.is_on(output)), None)


def _refusal(output: Path) -> str:
    return f"output is {str(output)!r}, which is being written by another run. Wait for it, or choose another folder."
