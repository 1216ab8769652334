"""Code that commands share: options, checks of files, and how results are printed."""

import contextlib
import importlib.util
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, CommandExit
from midus_hf.config.errors import RequestError, install_extra
from midus_hf.sources.names import check_model_name

if TYPE_CHECKING:
    from midus_hf.look.page import TextTable


def cli_option(help: str, metavar: str, *names: str, **settings: Any) -> Any:
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


Column = Annotated[str, cli_option("Column that holds the text.", "NAME")]
Device = Annotated[str | None, cli_option("Such as cpu or cuda:0.  [default: GPU, else cpu]", "NAME")]
Json = Annotated[bool, flag("--json", "Print one JSON object on standard output.")]


# Characters of a cell that stays in one line.
_SHORT_CELL = 12


def check_file(option: str, path: Path, suffixes: Sequence[str], drawn: Sequence[str] = ()) -> None:
    """Check that a file can be written."""
    if path.suffix not in suffixes:
        raise RequestError(f"{option} is {str(path)!r}; expected a file ending in {', '.join(suffixes)}.")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{option} is {str(path)!r}, in a folder that does not exist; create it first.")
    if path.suffix in drawn and importlib.util.find_spec("matplotlib") is None:
        raise RequestError(f"{option} has pictures, which need matplotlib; {install_extra('look')}.")


@contextlib.contextmanager
def needing_harness() -> Iterator[None]:
    """Refuse tasks if lm-evaluation-harness is missing, and say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("lm_eval", "datasets"):
            raise
        missing = f"tasks need lm-evaluation-harness ({package} is missing); {install_extra('eval')}"
        raise CommandExit(WRONG_REQUEST, missing) from error


def show(result: Any, json_: bool, print_result: Callable[[Any], None], indent: int | None = None) -> None:
    """Print a result: as one JSON object, indented by a number of spaces, or by `print_result` as readable text."""
    if json_:
        print(json.dumps(result, indent=indent, allow_nan=indent is None))
    else:
        print_result(result)


def show_tables(tables: "Sequence[TextTable]") -> None:
    """Print tables that have rows."""
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    plain: dict[str, Any] = {"show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    for table_of_words in tables:
        if not table_of_words.rows:
            continue
        table = Table(title=table_of_words.title, box=rich.box.SIMPLE_HEAD, **plain)
        cells = [max(map(len, column)) for column in zip(*table_of_words.rows, strict=True)]
        # Headings break between words; names in the first column do not, nor short cells where there is room.
        widths = [
            max(width, *map(len, name.split()), 1) for width, name in zip(cells, table_of_words.head, strict=True)
        ]
        fits = sum(min(width, _SHORT_CELL) + 2 for width in widths) <= console.width
        for name, width in zip(table_of_words.head, widths, strict=True):
            heading, is_name = textwrap.fill(name, width, break_long_words=False), not table.columns
            keeps_width = (fits and width <= _SHORT_CELL) or (is_name and width <= console.width // 3)
            table.add_column(Text(heading), overflow="fold", no_wrap=keeps_width)
        for row in table_of_words.rows:
            table.add_row(*map(Text, row))
        console.print(table)
