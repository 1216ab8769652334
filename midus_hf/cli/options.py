"""Parts that commands share: options, commands whose first argument is a subject, checks of files, and how results are printed."""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.config.wording import install_extra
from midus_hf.model_names import check_model_name

if TYPE_CHECKING:
    from midus_hf.look.page import TableOfWords


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


def _checked_models(context: typer.Context, names: list[str] | None) -> list[str] | None:
    if not context.resilient_parsing:
        for name in names or []:
            check_model_name("model", name)
    return names


Column = Annotated[str, option("Column that holds the text.", "NAME")]
Encoding = Annotated[str, option("Encoding of plain text and JSON.", "NAME")]
TaskData = Annotated[str | None, option("Folder with the questions of local tasks.", "DIR")]
TaskLimit = Annotated[int | None, option("Questions per task.  [default: all]", "N")]
Device = Annotated[str | None, option("Such as cpu or cuda:0.  [default: GPU, else cpu]", "NAME")]
Json = Annotated[bool, flag("--json", "Print one JSON object on standard output.")]


def sharing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is annotated with a dataclass by one option per field of the dataclass."""
    parameters: dict[str, inspect.Parameter] = {}
    shared: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            shared[name] = parameter.annotation
            parameters |= inspect.signature(shared[name]).parameters
        else:
            parameters[name] = parameter

    def with_groups(**options: Any) -> None:
        groups = {
            name: group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in shared.items()
        }
        command(**options, **groups)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    with_groups.__name__, with_groups.__doc__ = command.__name__, command.__doc__
    with_groups.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return with_groups


@dataclasses.dataclass(frozen=True)
class Subject:
    """A subject of a command.

    Args:
        help: Line of the help about the subject.
        takes: Names of the options that the subject takes, besides the options that all subjects take.
        needs: Names of the options that the subject requires. Default: none.
    """

    help: str
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()


class Subjects(dict[str, Subject]):
    """The subjects of a command whose first argument is one of them, such as a question of `midus look`, by name.

    Args:
        kind: What messages and the help call a subject, such as `"question"`.
        subjects: Subjects by name, in the order of the help.
    """

    def __init__(self, kind: str, subjects: dict[str, Subject]):
        super().__init__(subjects)
        self.kind = kind

    def command(self, app: typer.Typer, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that makes a function the only command of `app`; its help lists the subjects below `help`."""

        class Command(TyperCommand):
            """A command whose messages name the subject behind the command's name."""

            subjects = self

        width = max(map(len, self))
        listed = "\n".join(f"  {name:<{width}}  {subject.help}" for name, subject in self.items())
        return app.command(cls=Command, help=f"{help}\n\n\b\n{listed}")

    def argument(self) -> Any:
        """Return the annotation of the command's first argument, the name of a subject."""
        settings: dict[str, Any] = {"callback": self._known, "autocompletion": lambda: list(self)}
        return Annotated[str, argument("One of the list above.", self.kind.upper(), **settings)]

    def check_options(self, context: typer.Context, name: str, options: type, always: tuple[str, ...]) -> None:
        """Check that a subject has the options that it needs, and none of other subjects.

        `options` is a dataclass whose fields are the command's options, of which every subject takes `always`.

        Raises:
            ValueError: If an option is missing, or belongs to another subject.
        """
        fields: Any = dataclasses.fields(options)
        present = {field.name for field in fields if is_passed(context, field.name)}
        for name_of_option in sorted(present - {*always, *self[name].takes}):
            others = " and ".join(other for other, each in self.items() if name_of_option in each.takes)
            raise ValueError(f"{_as_typed(name_of_option)} is an option of {others}; leave it out.")
        for name_of_option in self[name].needs:
            if name_of_option not in present:
                raise ValueError(f"{_as_typed(name_of_option)} is missing; {name} needs it.")

    def _known(self, name: str) -> str:
        """Return `name` if it is a subject, or raise an error that suggests the nearest name."""
        if name in self:
            return name
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Expected one of: {', '.join(self)}."
        raise typer.BadParameter(f"No such {self.kind} {name!r}. {hint}")


def is_passed(context: typer.Context, name: str) -> bool:
    """Return whether a parameter is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _as_typed(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def check_file(
    option: str, path: Path, suffixes: Sequence[str], drawn: Sequence[str] = (), what: str = "has pictures, which need"
) -> None:
    """Check that a file can be written.

    Args:
        option: Option that names the file, for messages.
        path: Path of the file.
        suffixes: Endings that are allowed, such as `".csv"`.
        drawn: Endings of files for which matplotlib is needed. Default: none.
        what: Words between the option and "matplotlib" in the message about a missing matplotlib.

    Raises:
        ValueError: If the file has another ending, its folder does not exist, or matplotlib is missing.
    """
    if path.suffix not in suffixes:
        raise ValueError(f"{option} is {str(path)!r}; expected a file ending in {', '.join(suffixes)}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")
    if path.suffix in drawn and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} {what} matplotlib; {install_extra('look')}.")


@contextlib.contextmanager
def needing_harness() -> Iterator[None]:
    """Say what to install if lm-evaluation-harness, which tasks need, is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
            raise
        missing = f"tasks need lm-evaluation-harness ({error.name} is missing); {install_extra('eval')}"
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
