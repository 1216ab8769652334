"""Parts that all commands share: the style of the help, and how a command begins and ends.

A command ends with an exit status. If the status is not 0, one line on standard error says why.

| status | |
|---|---|
| 0 | done |
| 1 | the work failed |
| 2 | the request is wrong |
| 130, 143 | interrupted, terminated: 128 and the number of the signal |
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TextIO

import typer

from midus_hf.files.secrets import without_secrets
from midus_hf.version import __version__

FAILED, WRONG_REQUEST = 1, 2
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def command_line(help: str | None = None, **settings: Any) -> typer.Typer:
    """Return an empty command line in the style of all commands."""
    style: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    if help is not None:  # None itself would hide the docstring of a callback
        settings["help"] = help
    return typer.Typer(**{**style, **settings})


class Ending(Exception):
    """Exception that ends a command with an exit status, and a line that says why. None: the reason has been printed already."""

    def __init__(self, status: int, line: str | None = None):
        super().__init__(line)
        self.status = status
        self.line = line


def run_command(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str, raises: bool = False) -> int:
    """Run a command line, by default the words of `sys.argv`, and return its exit status, with one line if it is not 0.

    SIGTERM interrupts the work as Ctrl-C does. `raises`: whether unexpected errors are raised, for a traceback.
    """
    line_words = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in line_words:
        print(__version__)
        return 0
    command = typer.main.get_command(app)
    if f"_{name.upper()}_COMPLETE" in os.environ:  # a shell asks for completions
        command.main(prog_name=name)
    path = _command_path(command, name, line_words)
    with _termination_interrupts() as terminations:
        try:
            _refuse_empty(line_words)
            # `app()` would treat an EOFError of the work as an interruption.
            with command.make_context(name, line_words.copy(), help_option_names=["-h", "--help"]) as context:
                command.invoke(context)
            return 0
        except typer.Exit as end:
            return end.exit_code
        except Ending as end:
            status, line = end.status, end.line
        except KeyboardInterrupt:
            status, line = INTERRUPTED, "interrupted"
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
                status, line = FAILED, None
            elif hasattr(error, "format_message"):  # about arguments, from typer or click, depending on the version
                error_context = getattr(error, "ctx", None)
                if error_context is not None and [*name.split(), *line_words] == path.split():
                    print(error_context.get_help())
                    return 0
                message = error.format_message()
                stop = "" if message.endswith((".", "?")) else "."
                status, line = WRONG_REQUEST, f"{message}{stop} See '{path} --help'."
            elif raises:
                raise
            elif isinstance(error, ValueError):
                status, line = WRONG_REQUEST, str(error)
            else:
                status, line = FAILED, f"failed: {type(error).__name__}: {error}"
        if terminations and status == INTERRUPTED:
            status = TERMINATED
    if line is not None and is_main_process():
        print(f"{path}: {' '.join(without_secrets(line).split())}", file=sys.stderr)
    return status


def is_main_process() -> bool:
    """Return whether this process is the one that prints: rank 0 by the launcher's `RANK`, known before torch is set up."""
    return int(os.environ.get("RANK", 0)) == 0


def _command_path(command: Any, name: str, line_words: Sequence[str]) -> str:
    """Return the command's name, followed by the subcommands that the first words name."""
    for word in line_words:
        subcommand = command.commands.get(word) if hasattr(command, "get_command") else None
        if subcommand is None:
            break
        command, name = subcommand, f"{name} {word}"
    return name


def _is_unread(output: TextIO) -> bool:
    """Return whether nobody reads the output any more, as behind `| head`, and drop what is still to be written to it."""
    try:
        output.flush()
    except BrokenPipeError:
        # Otherwise Python flushes the output once more at its end, and reports the same error.
        with open(os.devnull, "w", encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), output.fileno())
        return True
    return False


def _refuse_empty(line_words: Sequence[str]) -> None:
    """Refuse empty words, which a shell makes of unset variables. As a path, an empty word would be the current folder."""
    for before, word in zip(["", *line_words], line_words, strict=False):
        name, equals, value = word.partition("=")
        if not word or (word.startswith("--") and equals and not value):
            subject = name if word else before if before.startswith("-") else "an argument"
            filling = "Fill it in (a shell gives nothing for a variable that is not set), or leave it out."
            raise Ending(WRONG_REQUEST, f"{subject} is ''; expected a value. {filling}")


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM raise `KeyboardInterrupt`, unless the process ignores SIGTERM. Yield a list of the signals that arrive."""
    terminations: list[int] = []
    process = os.getpid()
    is_main_thread = threading.current_thread() is threading.main_thread()  # Python handles signals in no other thread
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield terminations
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked worker: SIGTERM ends it at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        terminations.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield terminations
    finally:
        signal.signal(signal.SIGTERM, before)
