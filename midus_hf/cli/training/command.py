"""Parts of the commands that train: each makes one run, prints one line at its end, and sets the exit status."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from midus_hf.cli.command_line import FAILED, WRONG_REQUEST, Ending, is_main_process
from midus_hf.cli.options import argument

Overrides = Annotated[
    list[str] | None,
    argument("Keys that replace those of the file.", "KEY=VALUE", show_default=False),
]


def train_in_group(
    arguments_class: type[Any], prepare: Callable[[Any], Any], path: str, overrides: Sequence[str]
) -> None:
    """Read the arguments of a run, train, and print one line about the result.

    Args:
        arguments_class: The dataclass of the arguments.
        prepare: Makes a run of the arguments, whose `execute` returns a `TrainResult`.
        path: The YAML file of arguments.
        overrides: Words `key=value` that replace keys of the file.

    Raises:
        Ending: If the request is wrong, or the run failed or was interrupted.
    """
    group_is_ours = not _is_in_process_group()
    # `_train` returns the ending, since a raised exception would keep the trainer alive.
    ending = _train(arguments_class, prepare, path, overrides)
    if group_is_ours:
        _leave_process_group()
    if ending is not None:
        raise ending


def _train(
    arguments_class: type[Any], prepare: Callable[[Any], Any], path: str, overrides: Sequence[str]
) -> Ending | None:
    from midus_hf.cli.options import read_recipe
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.model_names import check_sources
    from midus_hf.training.callbacks import RunInterrupted
    from midus_hf.training.optim.finite import NotFiniteError

    try:
        arguments = read_recipe(arguments_class, path, overrides)
        check_sources(arguments.sources())
        with library_bars_on_terminals():
            run = prepare(arguments)
    except ValueError as error:
        return Ending(WRONG_REQUEST, str(error))
    try:
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except NotFiniteError as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None


_SECONDS_TO_SETTLE = 0.5


def _is_in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _leave_process_group() -> None:
    """Leave the launcher's process group: at exit, a thread of the group that is still alive may abort the process (gloo).

    A process that a second signal ends at once does not leave, since the others may be waiting for it.
    """
    if _is_in_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
        # A finishing thread of gloo releases tensors. It then waits for the interpreter's lock and holds a lock that the end of the
        # group needs. If garbage collection comes first, the two wait for each other for ever. The pause lets the thread finish.
        time.sleep(_SECONDS_TO_SETTLE)
        gc.collect()  # the cycles of trainer and model keep the group, and so its threads, alive
