"""What the commands that train have in common: one run, one line at its end, one way to end."""

import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import FAILED, WRONG_REQUEST, Ending, run_command

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys that replace those of the file.", show_default=False),
]


def run_training_command(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str) -> int:
    """Run a command that trains.

    Args:
        app: Its command line.
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it.

    Returns:
        Exit status: 0 done, 1 the trained model is not in the output, or was not finite, 2 the request is wrong, 130 or 143
        interrupted by Ctrl-C or SIGTERM; one line on standard error says how. Any other failure of the work raises.
    """
    return run_command(
        app,
        arguments,
        name=name,
        refusals=(),  # only while a run is prepared is a ValueError one: later it is a failure, and shows where
        failure=None,
        silent=not is_main_process(),
    )


def train_in_group(options_class: type[Any], module: str, path: str, overrides: Sequence[str]) -> None:
    """Read the options of a run, make it ready, train, and say in one line what was done.

    Args:
        options_class: The dataclass of the options.
        module: Name of the module whose `prepare` makes a run of them; it is imported once they have been read.
        path: The YAML file of options.
        overrides: Words `key=value` that replace options of the file.

    Raises:
        Ending: If not all was done.
    """
    group_is_ours = not _is_in_process_group()
    ending = _train(options_class, module, path, overrides)  # not raised there: an exception would hold the trainer
    if group_is_ours:
        _leave_process_group()
    if ending is not None:
        raise ending


def _train(options_class: type[Any], module: str, path: str, overrides: Sequence[str]) -> Ending | None:
    try:
        # What is wrong with a file of options costs no import of torch.
        config = _read_options(options_class, path, overrides)
    except ValueError as error:
        return Ending(WRONG_REQUEST, str(error))
    from midus_hf.documents import DocumentError
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.training.optim.finite import NotFiniteError
    from midus_hf.training.output.saving import SaveError
    from midus_hf.training.run.interruption import RunInterrupted

    try:
        try:
            with library_bars_on_terminals():
                run = importlib.import_module(module).prepare(config)
        except ValueError as error:
            return Ending(WRONG_REQUEST, str(error))
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except DocumentError as error:
        return Ending(WRONG_REQUEST, str(error))
    except (SaveError, NotFiniteError) as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}{speed}")
        if result.output != run.config.output_dir:
            return Ending(FAILED)
    return None


def _read_options(options_class: type[Any], path: str, overrides: Sequence[str]) -> Any:
    """Read the options of a run, and check that the model and the texts that they name are there.

    Raises:
        ValueError: If an option is wrong, the file is one of another command, or a model or text is not there.
    """
    from midus_hf.cli.recipes import read_recipe
    from midus_hf.model_names import check_sources

    config = read_recipe(options_class, path, overrides)
    check_sources(config.sources())
    return config


_SECONDS_TO_SETTLE = 0.5


def _is_in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _leave_process_group() -> None:
    """Leave the group of a launcher's processes: a thread of it that is left at exit may abort the process (gloo).

    An interrupted process does not: the others may be waiting for it.
    """
    if _is_in_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
        # A thread of gloo that has just finished lets go of tensors, for which it needs the interpreter's lock, while it holds one
        # that the end of the group asks for: where collecting gets there first, both wait for ever. This lets it go first.
        time.sleep(_SECONDS_TO_SETTLE)
        gc.collect()  # Trainer and model are cycles, and hold the group and so its threads


def is_main_process() -> bool:
    """Whether this process is the one that speaks: by what launchers say, so that it is known before anything is set up."""
    return int(os.environ.get("RANK", 0)) == 0
