"""Code that all commands share: how a command starts and ends, options, and how results are printed.

A status other than 0 comes with the reason in one line on standard error, and after an unexpected error where it was raised.

| status | |
|---|---|
| 0 | done |
| 1 | the work failed |
| 2 | the request is refused (`midus_hf.RequestError`) |
| 3 | done, but not all output could be written, for example because a disk is full |
| 130, 143 | interrupted, terminated: 128 and the number of the signal |
"""

import contextlib
import errno
import importlib.util
import io
import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.config.errors import RequestError, install_extra, is_main_process, traceback_places
from midus_hf.config.plugins import plugin_packages
from midus_hf.files.outputs import as_disk_error
from midus_hf.files.secrets import without_secrets
from midus_hf.sources.downloads import as_download_error
from midus_hf.sources.names import check_model_name
from midus_hf.version import __version__

if TYPE_CHECKING:
    from midus_hf.look.page import TextTable

# Characters of a cell that stays in one line.
_SHORT_CELL = 12
FAILED, WRONG_REQUEST, NOT_PRINTED = 1, 2, 3
_NO_HOME = "Could not determine home directory."  # an error of `Path.expanduser`
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def command_line(help: str | None = None, **settings: Any) -> typer.Typer:
    style: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    if help is not None:  # None itself would hide the docstring of a callback
        settings["help"] = help
    return typer.Typer(**{**style, **settings})


class CommandExit(Exception):
    """Exception that ends a command with an exit status and the reason; None: it has been printed already.

    `from_any_process`: whether any process of a run prints the reason, and not only the first.
    """

    def __init__(self, status: int, line: str | None = None, *, from_any_process: bool = False):
        super().__init__(line)
        self.status = status
        self.line = line
        self.from_any_process = from_any_process


def run_command(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str, raises: bool = False) -> int:
    """Run a command line, by default `sys.argv`; return its exit status, with one line if it is not 0.

    SIGTERM interrupts the work as Ctrl-C does. `raises`: whether unexpected errors are raised, for a traceback.
    """
    with _lasting_output() as not_printed:
        status, line, places = _run(app, list(sys.argv[1:] if arguments is None else arguments), name, raises)
        if line is not None:
            print(" ".join(without_secrets(line).split()), file=sys.stderr)
            for place in places:
                print(without_secrets(place), file=sys.stderr)
        sys.stdout.flush()
        if not_printed and status == 0:
            status = NOT_PRINTED
            print(f"{name}: done, but not all output could be written: {not_printed[0]}", file=sys.stderr)
    return status


def _with_hyphens(option: str) -> str:
    """Return the name of an option as it is declared: `--max_tokens` is `--max-tokens`, as keys of a run take both."""
    return option.replace("_", "-")


def _run(app: typer.Typer, line_words: list[str], name: str, raises: bool) -> tuple[int, str | None, list[str]]:
    """Run a command line; return its exit status, the reason in one line, and where an error was raised."""
    if "--version" in line_words:
        print(__version__)
        return 0, None, []
    command = typer.main.get_command(app)
    if f"_{name.upper()}_COMPLETE" in os.environ:  # a shell asks for completions
        command.main(prog_name=name)
    path = name
    places = list[str]()
    within: Any = command
    for word in line_words:  # the first ones name subcommands
        within = getattr(within, "commands", {}).get(word)
        if within is None:
            break
        path = f"{path} {word}"
    is_printed = is_main_process()
    with _termination_interrupts() as terminations:
        try:
            # A shell passes empty words for unset variables. As a path, one would be the current folder.
            for before, word in zip(["", *line_words], line_words, strict=False):
                option, equals, value = word.partition("=")
                if not word or (word.startswith("--") and equals and not value):
                    named_before = before if before.startswith("-") else "an argument"
                    subject = option if word else named_before
                    filling = "Fill it in (a shell gives nothing for a variable that is not set), or leave it out."
                    raise CommandExit(WRONG_REQUEST, f"{subject} is ''; expected a value. {filling}")
            # `app()` would treat an EOFError of the work as an interruption.
            settings: dict[str, Any] = {"help_option_names": ["-h", "--help"], "token_normalize_func": _with_hyphens}
            with command.make_context(name, line_words.copy(), **settings) as context:
                command.invoke(context)
            return 0, None, []
        except typer.Exit as end:
            return end.exit_code, None, []
        except CommandExit as end:
            status, line = end.status, end.line
            is_printed |= end.from_any_process
        except KeyboardInterrupt:
            status = INTERRUPTED
            line = "interrupted"
        except Exception as error:
            if hasattr(error, "format_message"):  # about arguments, from typer or click, depending on the version
                error_context = getattr(error, "ctx", None)
                if error_context is not None and [*name.split(), *line_words] == path.split():
                    print(error_context.get_help())
                    return 0, None, []
                message = error.format_message()
                stop = "" if message.endswith((".", "?")) else "."
                status = WRONG_REQUEST
                line = f"{message}{stop} See '{path} --help'."
            elif (told := as_disk_error(error) or as_download_error(error)) is not None:
                status = FAILED
                line = str(told)
            elif isinstance(error, RequestError):
                status = WRONG_REQUEST
                line = str(error)
            elif isinstance(error, RuntimeError) and str(error) == _NO_HOME:
                status, line = (
                    WRONG_REQUEST,
                    "a path begins with '~', and there is no such home folder. Give the whole path.",
                )
            elif raises:
                raise
            else:
                status = FAILED
                line = f"failed: {type(error).__name__}: {error}"
                places = traceback_places(error, {"midus_hf", "upscalers", *plugin_packages()})
        if terminations and status == INTERRUPTED:
            status = TERMINATED
    return status, f"{path}: {line}" if line is not None and is_printed else None, places


class _TolerantOutput(io.FileIO):
    """Stream that drops output after an error, appended to `errors` unless the reader closed the pipe."""

    errors: list[str]

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.errors.append(error.strerror or str(error))
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())  # for threads and libraries that write to it themselves, too
            os.close(nothing)
            return len(content)


@contextlib.contextmanager
def _lasting_output() -> Iterator[list[str]]:
    """Make print never raise: drop output that cannot be written, list the reason, escape unknown letters."""
    before: tuple[Any, Any] = (sys.stdout, sys.stderr)
    errors, lasting = list[str](), list[Any]()
    for stream in before:
        buffer: Any = getattr(stream, "buffer", None)
        if stream is None:  # closed by the shell
            stream = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
        elif type(stream) is io.TextIOWrapper and type(getattr(buffer, "raw", buffer)) is io.FileIO:
            stream.flush()  # others, set by a program or a notebook, are kept
            raw = _TolerantOutput(stream.fileno(), "wb", closefd=False)
            raw.errors = errors
            buffer = raw if isinstance(buffer, io.FileIO) else io.BufferedWriter(raw)
            settings: dict[str, Any] = {"encoding": stream.encoding, "errors": "backslashreplace"}
            settings |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            stream = io.TextIOWrapper(buffer, **settings)
        lasting.append(stream)
    sys.stdout, sys.stderr = lasting
    try:
        yield errors
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class Termination(KeyboardInterrupt):
    """Interruption by SIGTERM, which ends a command where Ctrl-C only stops an answer."""


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM raise `Termination`, unless ignored; yield a list of the signals that arrive."""
    terminations: list[int] = []
    process = os.getpid()
    # Python handles signals only in the main thread.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield terminations
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked worker: SIGTERM ends it at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        terminations.append(number)
        raise Termination

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield terminations
    finally:
        signal.signal(signal.SIGTERM, before)


def cli_option(help: str, metavar: str, *names: str, **settings: Any) -> Any:
    """Return an option with a value, by default named as the parameter; `settings` are for `typer.Option`."""
    return typer.Option(*names, help=help, metavar=metavar, **settings)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def argument(help: str, metavar: str, **settings: Any) -> Any:
    return typer.Argument(help=help, metavar=metavar, **settings)


def model_argument(help: str, metavar: str) -> Any:
    """Return an argument for one or several models, checked for existence before heavy imports."""
    return argument(help, metavar, callback=_checked_models)


def _checked_models(context: typer.Context, names: str | list[str] | None) -> str | list[str] | None:
    several = [names] if isinstance(names, str) else names
    if several and not context.resilient_parsing:
        for name in several:
            check_model_name("model", name)
    return names


Column = Annotated[str, cli_option("Column that holds the text.", "NAME")]
Device = Annotated[str | None, cli_option("Such as cpu or cuda:0.  [default: GPU, else cpu]", "NAME")]
Json = Annotated[bool, flag("--json", "Print one JSON object on standard output.")]


def check_file(option: str, path: Path, suffixes: Sequence[str], drawn: Sequence[str] = ()) -> None:
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
    """Print a result as one JSON object, with an indent of spaces, or by `print_result` as readable text."""
    if json_:
        print(json.dumps(result, indent=indent, allow_nan=indent is None))
    else:
        print_result(result)


def show_tables(tables: "Sequence[TextTable]") -> None:
    """Print tables that fit the terminal's width; those without rows are left out."""
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
            heading = textwrap.fill(name, width, break_long_words=False)
            is_name = not table.columns
            keeps_width = (fits and width <= _SHORT_CELL) or (is_name and width <= console.width // 3)
            table.add_column(Text(heading), overflow="fold", no_wrap=keeps_width)
        for row in table_of_words.rows:
            table.add_row(*map(Text, row))
        console.print(table)
