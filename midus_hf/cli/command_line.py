"""What all commands have in common: the style of their help, how they begin, and how they end.

A command ends with an exit status, and with one line on standard error that says why the status is not 0.

| status | |
|---|---|
| 0 | done |
| 1 | the work failed |
| 2 | the request is wrong |
| 130, 143 | interrupted, terminated: 128 and the number of the signal |
"""

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import typer

FAILED, WRONG_REQUEST = 1, 2
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def command_line(help: str | None = None, **settings: Any) -> typer.Typer:
    """Return an empty command line in the style of all commands.

    Args:
        help: What the help begins with. Default: the docstring of the only command.
        settings: Of typer, besides.
    """
    style: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    return typer.Typer(help=help, **{**style, **settings})


class Ending(Exception):
    """Ends a command.

    Args:
        status: Its exit status.
        line: What a person is told; None if they have been told already.
    """

    def __init__(self, status: int, line: str | None = None):
        super().__init__(line)
        self.status = status
        self.line = line


def run_command(
    app: typer.Typer,
    arguments: Sequence[str] | None = None,
    *,
    name: str,
    refusals: tuple[type[Exception], ...] = (ValueError,),
    failure: str | None = "failed: ",
    interruption: str = "interrupted",
    silent: bool = False,
) -> int:
    """Run a command line, and say in one line, behind its name, how it ended unless it is done.

    SIGTERM interrupts the work as Ctrl-C does, so that what is half done is cleaned up. `--version` is understood by every command,
    and a command that needs arguments and gets none shows its help.

    Args:
        app: The command line.
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it.
        refusals: Errors that mean that the request is wrong. What the command line's reader says is one in any case.
            Default: `ValueError`.
        failure: What stands before any other error; None lets it be raised, for a status of 1 and a traceback.
            Default: `"failed: "`.
        interruption: What an interruption is told as, unless an `Ending` says more. Default: `"interrupted"`.
        silent: Whether to say no line, since another process does. Default: false.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in words:
        print(importlib.metadata.version("midus-hf"))
        return 0
    command = typer.main.get_command(app)
    path = _command_path(command, name, words)
    with contextlib.ExitStack() as stack:
        heard = stack.enter_context(_termination_interrupts())
        try:
            _refuse_empty(words)
            # Calling the app would take an end of file that the work runs into for an interruption.
            with command.make_context(name, words.copy(), help_option_names=["-h", "--help"]) as context:
                command.invoke(context)
            return 0
        except typer.Exit as end:
            return end.exit_code
        except Ending as end:
            status, line = end.status, end.line
            if heard and status == INTERRUPTED:
                status = TERMINATED
        except KeyboardInterrupt:
            status, line = TERMINATED if heard else INTERRUPTED, interruption
        except refusals as error:
            status, line = WRONG_REQUEST, str(error)
        except Exception as error:
            if hasattr(error, "format_message"):  # the reader's, whose class is now typer's and now click's
                reader = getattr(error, "ctx", None)
                if reader is not None and [*name.split(), *words] == path.split():
                    print(reader.get_help())
                    return 0
                status, line = WRONG_REQUEST, f"{error.format_message()} See '{path} --help'."
            elif failure is None:
                raise
            else:
                status, line = FAILED, f"{failure}{type(error).__name__}: {error}"
    if line is not None and not silent:
        print(f"{path}: {' '.join(line.split())}", file=sys.stderr)
    return status


def _command_path(command: Any, name: str, words: Sequence[str]) -> str:
    """Return the names of a command and of the subcommands, or the subject, that the first words name."""
    for word in words:
        subcommand = command.commands.get(word) if hasattr(command, "get_command") else None
        if subcommand is None and word in getattr(command, "subjects", ()):
            return f"{name} {word}"
        if subcommand is None:
            break
        command, name = subcommand, f"{name} {word}"
    return name


def _refuse_empty(words: Sequence[str]) -> None:
    """See that no word is empty, as a variable of a shell that was never set: as a path it would be the current folder.

    Raises:
        Ending: If one is.
    """
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if word and not (word.startswith("--") and equals and not value):
            continue
        what = name if word else before if before.startswith("-") else "an argument"
        raise Ending(
            WRONG_REQUEST,
            f"{what} is ''; expected a value. Fill it in (a shell gives nothing for a variable that is not set), or leave it out.",
        )


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM interrupt, unless it is ignored; gives a list of those that came."""
    heard: list[int] = []
    process = os.getpid()
    is_heard = threading.current_thread() is threading.main_thread()  # Python handles signals nowhere else
    if not is_heard or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield heard
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # one that was forked for a part of the work, and is ended when that is done
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        heard.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)
