"""The `midus-train` command."""

import ast
import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from midus_commands.exit_status import FAILED, WRONG_REQUEST, Ending, run_command


def main(arguments: Sequence[str] | None = None, name: str = "midus-train") -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it. Default: `midus-train`.

    Returns:
        Exit status: 0 done, 1 the trained model is not in the output, 2 the request is wrong, 130 or 143 interrupted
        by Ctrl-C or SIGTERM; one line on standard error says how. Any other failure of the work raises.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog=_keys(), context_settings={"help_option_names": ["-h", "--help"]})(midus_train)
    return run_command(
        app,
        arguments,
        name,
        named_lines=False,
        refusals=(),  # only while a run is prepared is a ValueError one: later it is a failure, and shows where
        hint=f" See '{name} --help'.",
        failure=None,
        silent=not _is_main_process(),
    )


def midus_train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of options; the recipes are in configs/train.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options that replace those of the file.", show_default=False),
    ] = None,
) -> None:
    """Pretrain a model: one that was upscaled, by default as its method says, any other, or one from the beginning."""
    group_is_ours = not _is_in_process_group()
    ending = _train(config, overrides or [])  # not raised there: an exception would hold the trainer
    if group_is_ours:
        _leave_process_group()
    if ending is not None:
        raise ending


def _train(path: str, overrides: list[str]) -> Ending | None:
    from midus_hf.config_file import read_config
    from midus_hf.documents import DocumentError
    from midus_hf.training.interruption import RunInterrupted
    from midus_hf.training.options import TrainConfig
    from midus_hf.training.progress import without_library_bars
    from midus_hf.training.run import prepare
    from midus_hf.training.saving import SaveError

    try:
        try:
            config = read_config(TrainConfig, path, overrides)
            with contextlib.nullcontext() if sys.stderr.isatty() else without_library_bars():
                run = prepare(config)
        except ValueError as error:
            return Ending(WRONG_REQUEST, str(error))
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except DocumentError as error:
        return Ending(WRONG_REQUEST, str(error))
    except SaveError as error:
        return Ending(FAILED, str(error))
    if _is_main_process():
        speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}{speed}")
        if result.output != run.config.output:
            return Ending(FAILED)
    return None


def _is_in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _leave_process_group() -> None:
    """Leave the group of a launcher's processes: a thread of it that is left at exit may abort the process (gloo).

    An interrupted process does not: the others may be waiting for it.
    """
    if _is_in_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
        gc.collect()  # Trainer and model are cycles, and hold the group and so its threads


def _is_main_process() -> bool:
    """By what launchers say, so that it is known before anything is set up."""
    return int(os.environ.get("RANK", 0)) == 0


def _keys() -> str:
    """What the docstrings of the options say of their keys, read from the source: importing it takes seconds."""
    package = importlib.util.find_spec("midus_hf")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0], "training")
    trees = [
        ast.parse((folder / name).read_text(encoding="utf-8")) for name in ("options.py", "run_options.py", "rates.py")
    ]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def keys_of(name: str) -> str:
        documentation = ast.get_docstring(classes[name]) or ""
        return documentation.partition("Args:\n")[2].partition("\n\nRaises:")[0]

    sections = (
        f"keys of CONFIG:\n{keys_of('RunOptions')}\n{keys_of('TrainConfig')}",
        f"rates, which are keys of CONFIG too:\n{keys_of('Rates')}",
        f"keys of corpus:\n{keys_of('CorpusOptions')}",
        f"and, where corpus is a list, of each of its corpora:\n{keys_of('WeightedCorpus')}",
    )
    return "\n\n".join(f"\b\n{section}" for section in sections)  # \b keeps the lines of a paragraph as they are
