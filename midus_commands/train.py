"""The command line of continual pretraining: `train_cpt.py CONFIG.yaml [key=value ...]`."""

import argparse
import ast
import contextlib
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_FAILED, _WRONG_REQUEST = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.

    Returns:
        Exit status: 0 done, 1 the trained model is not in the output, 2 the request is wrong, 130 or 143 interrupted
        by Ctrl-C or SIGTERM; one line on standard error says how. Any other failure of the work raises.
    """
    options = _parser().parse_args(arguments)
    group_is_ours = not _is_in_process_group()
    try:
        status = _train(options)
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT)
    if group_is_ours:
        _leave_process_group()
    return status


def _train(options: argparse.Namespace) -> int:
    from midus_hf.config_file import read_config
    from midus_hf.documents import DocumentError
    from midus_hf.training.interruption import RunInterrupted
    from midus_hf.training.options import TrainConfig
    from midus_hf.training.progress import without_library_bars
    from midus_hf.training.run import prepare
    from midus_hf.training.saving import SaveError

    try:
        try:
            config = read_config(TrainConfig, options.config, options.overrides)
            with contextlib.nullcontext() if sys.stderr.isatty() else without_library_bars():
                run = prepare(config)
        except ValueError as error:
            return _fail(f"error: {error}", _WRONG_REQUEST)
        result = run.execute()
    except RunInterrupted as interrupted:
        return _fail(str(interrupted), 128 + interrupted.signal_number)
    except DocumentError as error:
        return _fail(f"error: {error}", _WRONG_REQUEST)
    except SaveError as error:
        return _fail(f"error: {error}", _FAILED)
    if not _is_main_process():
        return 0
    speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}{speed}")
    return 0 if result.output == run.config.output else _FAILED


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


def _fail(message: str, status: int) -> int:
    if _is_main_process():
        print(" ".join(message.split()), file=sys.stderr)
    return status


def _is_main_process() -> bool:
    """By what launchers say, so that it is known before anything is set up."""
    return int(os.environ.get("RANK", 0)) == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_cpt.py",
        description="Continue the pretraining of a model, by default of the layers that its upscaling method trains.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file of options; the recipes are in configs/train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options that replace those of the file")
    return parser


def _keys() -> str:
    """What the docstrings of the options say of their keys, read from the source: importing it takes seconds."""
    package = importlib.util.find_spec("midus_hf")
    assert package is not None and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "training", "options.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}

    def keys_of(name: str) -> str:
        documentation = ast.get_docstring(classes[name]) or ""
        return documentation.partition("Args:\n")[2].partition("\n\nRaises:")[0]

    return (
        f"{keys_of('TrainConfig')}\n\nkeys of corpus:\n{keys_of('CorpusOptions')}\n\n"
        f"and, where corpus is a list, of each of its corpora:\n{keys_of('WeightedCorpus')}"
    )
