"""`--print-config METHOD` of the commands that train: a recipe of the method, with our other keys and their defaults as comments."""

import ast
import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.config.yaml_options import read_yaml

_PACKAGE = Path(__file__).parents[2]
# Part of a recipe's name: nearly every method has a recipe for this model.
_FIRST_CHOICE = "llama-3.2-1b"
_WIDTH = 118
# Methods that the MIDUS paper trains as MIDUS-HML (appendix B.1), by what they train.
_TRAINED_AS_MIDUS_HML = {
    **dict.fromkeys(("midus-pkm", "midus-linear", "moc", "moda", "ultramem-v2"), "new"),
    **dict.fromkeys(("solar", "llama-pro", "lesa", "opt-deus", "avg-deus"), "auto"),
}


def print_config_option(command: str, options_class: Callable[[], type], sources: tuple[str, ...]) -> Any:
    """Return the option `--print-config METHOD`, which prints a recipe and ends the command.

    Args:
        command: Name of the folder of recipes in `configs`, which is also the name of the command: `train` or `sft`.
        options_class: Function that imports and returns the dataclass of the command's keys.
        sources: Paths within `midus_hf` of the files whose docstrings describe the keys.
    """

    def show(context: typer.Context, method: str | None) -> None:
        if method is not None and not context.resilient_parsing:
            try:
                print(config_text(command, method, options_class(), sources), end="")
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


def config_text(command: str, method: str, options_class: type, sources: tuple[str, ...]) -> str:
    """Return a recipe of a method as YAML: the keys of the shipped recipe, then our other keys as comments with their defaults.

    Arguments are as in `print_config_option`; `method` may also be the name of a shipped recipe.

    Raises:
        ValueError: If there is no method and no recipe of this name.
    """
    recipe = _recipe(command, method)
    text = _unwritten_recipe(command, method) if recipe is None else recipe
    written = read_yaml(text)
    described = _descriptions(*sources)
    lines = ["", "# Keys of memories and texts, with their defaults; every key of the Trainer's arguments works too:"]
    lines += _described_keys(options_class, described, written, "# ")
    return f"{text.rstrip()}\n" + "\n".join(lines) + "\n"


def _described_keys(options_class: Any, described: dict[str, str], written: Collection[str], indent: str) -> list[str]:
    """Return the lines of all keys that are described and not written, each below its description, behind an indent."""
    lines = []
    for field in dataclasses.fields(options_class):
        if field.name not in written and field.name in described:
            lines += ["", *textwrap.wrap(described[field.name], _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"{indent}{field.name}: {_default(field)}")
    return lines


def recipes(command: str) -> dict[str, Path]:
    """Return the paths of a command's recipes by name, from the installed package or from the clone of the repository."""
    installed = _PACKAGE / "configs" / command
    folder = installed if installed.is_dir() else _PACKAGE.parent / "configs" / command
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _recipe(command: str, method: str) -> str | None:
    """Return the text of the recipe that has this name or belongs to this method; None for a method without a recipe."""
    by_name = recipes(command)
    for name in (method, f"{method}-{_FIRST_CHOICE}"):
        if name in by_name:
            return by_name[name].read_text(encoding="utf-8")
    for name, path in by_name.items():
        if name.startswith(f"{method}-{_FIRST_CHOICE}-"):
            return path.read_text(encoding="utf-8")
    if command == "train" and method in _TRAINED_AS_MIDUS_HML:
        text = by_name[f"midus-hml-{_FIRST_CHOICE}"].read_text(encoding="utf-8")
        text = text.replace("midus-hml-", f"{method}-").replace("--method midus-hml", f"--method {method}")
        text = re.sub(r"^# The paper trains all .*?\n(?=\w)", "", text, flags=re.MULTILINE | re.DOTALL)
        text = text.replace("MIDUS-HML on", f"{method}, trained as MIDUS-HML, on").replace("1b-hml", f"1b-{method}")
        return text.replace("trainable: new ", f"trainable: {_TRAINED_AS_MIDUS_HML[method]} ").replace(
            f"midus train configs/train/{method}-{_FIRST_CHOICE}.yaml", "midus train THIS_FILE"
        )
    import upscalers.methods  # noqa: F401  # which registers the methods
    from upscalers.methods.contract import METHODS, load_offered_methods

    load_offered_methods()

    if method in METHODS:
        return None
    raise ValueError(
        f"{method!r} is no method and no recipe. Methods: {', '.join(sorted(METHODS))}. Recipes: {', '.join(by_name)}."
    )


def _unwritten_recipe(command: str, method: str) -> str:
    """Return a recipe of the required keys, for a method whose paper gives no settings."""
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


def _descriptions(*files: str) -> dict[str, str]:
    """Return the description of each key, from docstrings in the source files, since importing the classes would import torch."""
    described: dict[str, str] = {}
    for file in files:
        for node in ast.parse((_PACKAGE / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                arguments = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
                for entry in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", arguments, re.MULTILINE):
                    described.setdefault(entry.group(1), " ".join(entry.group(2).split()))
    return described
