"""Parts that commands share: options, checks of files, and how results are printed."""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.config.wording import install_extra
from midus_hf.config.yaml_options import read_config, read_mapping
from midus_hf.model_names import check_model_name

if TYPE_CHECKING:
    from midus_hf.look.page import TableOfWords

Options = TypeVar("Options")


def option(help: str, metavar: str, *names: str, **settings: Any) -> Any:
    """Return an option that takes a value. Default name: that of the parameter. `settings` are arguments of `typer.Option`."""
    return typer.Option(*names, help=help, metavar=metavar, **settings)


def flag(name: str, help: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(name, help=help)


def argument(help: str, metavar: str, **settings: Any) -> Any:
    """Return an argument. `settings` are further arguments of `typer.Argument`."""
    return typer.Argument(help=help, metavar=metavar, **settings)


def model_argument(help: str, metavar: str) -> Any:
    """Return an argument that names one or several models, and checks that they exist before heavy imports."""
    return argument(help, metavar, callback=_checked_models)


def _checked_models(context: typer.Context, names: str | list[str] | None) -> str | list[str] | None:
    if not context.resilient_parsing:
        for name in [names] if isinstance(names, str) else names or []:
            check_model_name("model", name)
    return names


Column = Annotated[str, option("Column that holds the text.", "NAME")]
Device = Annotated[str | None, option("Such as cpu or cuda:0.  [default: GPU, else cpu]", "NAME")]
Json = Annotated[bool, flag("--json", "Print one JSON object on standard output.")]


def options_of(settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option per field of a dataclass, in place of the parameter `options`.

    `options` becomes the values that the command line has, by the names of their fields, without defaults. The command's first
    parameter is its context.
    """
    fields = inspect.signature(settings).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in fields}
            of_fields = {name: values.pop(name) for name in fields}
            written = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
            command(context, **values, options={name: of_fields[name] for name in written})

        context, *own = (each for name, each in inspect.signature(command).parameters.items() if name != "options")
        parameters = [
            context,
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*fields.values(), *own)),
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


# Command that a key points to, if the file is not for the command at hand. Of several keys, the first one here decides.
_COMMAND_BY_KEY = {
    "variants": "midus compare",
    "corpus": "midus train",
    "dataset_name": "midus sft",
    "method": "upscale --config",
    "tasks": "midus eval MODEL --config",
}


def read_recipe(options_class: type[Options], path: str | Path, overrides: Sequence[str]) -> Options:
    """Return the options of a YAML file as a dataclass, as `midus_hf.config.yaml_options.read_config` does.

    Raises:
        ValueError: As `read_config`. If the file is for another command, the message names that command.
    """
    try:
        return read_config(options_class, path, overrides)
    except ValueError:
        refuse_other_command(options_class, path, [word.partition("=")[0] for word in overrides])
        raise


def refuse_other_command(options_class: type, path: str | Path, keys: Iterable[str] = ()) -> None:
    """Refuse a file that holds a key of another command, or is read with one, unless `options_class` has the key as well.

    Raises:
        ValueError: If it does. The message names that command.
    """
    present = {*read_mapping(path), *keys}
    foreign_keys = [key for key in _COMMAND_BY_KEY if key in present]
    fields: Any = dataclasses.fields(options_class)  # type: ignore[arg-type]
    if foreign_keys and not any(field.name in foreign_keys for field in fields):
        command = _COMMAND_BY_KEY[foreign_keys[0]]
        raise ValueError(f"{path} has {foreign_keys[0]!r}, a key of another command; run '{command} {path}'.")


def check_file(option: str, path: Path, suffixes: Sequence[str], drawn: Sequence[str] = ()) -> None:
    """Check that a file can be written.

    Args:
        option: Option that names the file, for messages.
        path: Path of the file.
        suffixes: Endings that are allowed, such as `".csv"`.
        drawn: Endings of files for which matplotlib is needed. Default: none.

    Raises:
        ValueError: If the file has another ending, its folder does not exist, or matplotlib is missing.
    """
    if path.suffix not in suffixes:
        raise ValueError(f"{option} is {str(path)!r}; expected a file ending in {', '.join(suffixes)}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")
    if path.suffix in drawn and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} has pictures, which need matplotlib; {install_extra('look')}.")


@contextlib.contextmanager
def needing_harness() -> Iterator[None]:
    """Say what to install if lm-evaluation-harness, which tasks need, is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("lm_eval", "datasets"):
            raise
        missing = f"tasks need lm-evaluation-harness ({package} is missing); {install_extra('eval')}"
        raise Ending(WRONG_REQUEST, missing) from error


def show(result: Any, json_: bool, print_result: Callable[[Any], None], indent: int | None = None) -> None:
    """Print a result: as one object of JSON, with an indent in spaces, or as `print_result` prints it for a person."""
    if json_:
        print(json.dumps(result, indent=indent, allow_nan=indent is None))
    else:
        print_result(result)


def show_tables(tables: "Sequence[TableOfWords]") -> None:
    """Print tables that have rows."""
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    plain: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    for table_of_words in tables:
        if not table_of_words.rows:
            continue
        table = Table(title=table_of_words.title, box=rich.box.SIMPLE_HEAD, **plain)
        for name in table_of_words.head:
            table.add_column(Text(name), overflow="fold")
        for row in table_of_words.rows:
            table.add_row(*map(Text, row))
        console.print(table)
