"""`--print-config METHOD` of the commands that train: a recipe of the method, with our other keys and their defaults as comments."""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.config.yaml_options import read_yaml

_PACKAGE = Path(__file__).parents[2]
_WIDTH = 118


def print_config_option(command: str, options_class: Callable[[], type]) -> Any:
    """Return the option `--print-config METHOD`, which prints a recipe and ends the command.

    Args:
        command: Name of the folder of recipes in `configs`, which is also the name of the command: `train` or `sft`.
        options_class: Function that imports and returns the dataclass of the command's keys.
    """

    def show(context: typer.Context, method: str | None) -> None:
        if method is not None and not context.resilient_parsing:
            try:
                print(config_text(command, method, options_class()), end="")
            except ValueError as error:
                raise Ending(WRONG_REQUEST, str(error)) from error
            raise typer.Exit

    return typer.Option(
        "--print-config",
        help="Print a recipe with every key, and stop.",
        metavar="METHOD",
        is_eager=True,
        callback=show,
    )


def config_text(command: str, method: str, options_class: type) -> str:
    """Return a recipe of a method as YAML: the keys of the shipped recipe, then our other keys as comments with their defaults.

    Arguments are as in `print_config_option`; `method` may also be the name of a shipped recipe.

    Raises:
        ValueError: If there is no method and no recipe of this name.
    """
    text = _recipe(command, method)
    written, described = read_yaml(text, f"the recipe of {method}"), _descriptions(options_class)
    lines = ["", "# Keys of memories and texts, with their defaults; every key of the Trainer's arguments works too:"]
    fields: Any = dataclasses.fields(options_class)
    for field in fields:
        if field.name not in written and field.name in described:
            lines += ["", *textwrap.wrap(described[field.name], _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"# {field.name}: {_default(field)}")
    return f"{text.rstrip()}\n" + "\n".join(lines) + "\n"


def recipes(command: str) -> dict[str, Path]:
    """Return the paths of a command's recipes by name, from the installed package or from the clone of the repository."""
    installed = _PACKAGE / "configs" / command
    folder = installed if installed.is_dir() else _PACKAGE.parent / "configs" / command
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _recipe(command: str, method: str) -> str:
    """Return the text of the recipe of this name; of required keys for a method that has none."""
    by_name = recipes(command)
    if method in by_name:
        return by_name[method].read_text(encoding="utf-8")
    import upscalers.methods  # noqa: F401  # which registers the methods
    from upscalers.methods.contract import METHODS, load_offered_methods

    load_offered_methods()
    if method not in METHODS:
        raise ValueError(
            f"{method!r} is no method and no recipe. Methods: {', '.join(sorted(METHODS))}. Recipes: {', '.join(by_name)}."
        )
    data = "corpus: TEXTS" if command == "train" else "dataset_name: CHATS.jsonl"
    return (
        f"# {method}, by default settings: there is no recipe of a paper.\n"
        f"#   midus {command} THIS_FILE\n"
        f"model_name_or_path: UPSCALED\noutput_dir: outputs/{method}\n{data}\n"
    )


def _default(field: Any) -> str:
    """Return the default of a key as YAML; for a required key, its name in capitals."""
    if field.default is field.default_factory is dataclasses.MISSING:
        return field.name.upper()
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    if isinstance(field.default, float):
        return repr(field.default) if re.search(r"\.", repr(field.default)) else f"{field.default:.1e}"
    return json.dumps(field.default)


def _descriptions(options_class: type) -> dict[str, str]:
    """Return the description of each key of ours, from the docstrings of the dataclass and of the classes that it extends."""
    described: dict[str, str] = {}
    for kind in options_class.__mro__:
        if kind.__module__.startswith("midus_hf."):
            arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
            for entry in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", arguments, re.MULTILINE):
                described.setdefault(entry.group(1), " ".join(entry.group(2).split()))
    return described
