"""Commands whose first argument is a subject, such as a question of `midus look`. Each subject takes some of the options."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import typer
from typer.core import TyperCommand

Work = TypeVar("Work", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Subject:
    """A subject of a command.

    Args:
        help: Line of the help about the subject.
        takes: Names of the options that the subject takes, besides the options that all subjects take.
        needs: Names of the options that the subject requires.
        work: Function that does the work.
    """

    help: str
    takes: tuple[str, ...]
    needs: tuple[str, ...]
    work: Callable[..., Any]


class Subjects(Generic[Work]):
    """The subjects of one command by name, in the order in which they were registered.

    Args:
        kind: What messages and the help call a subject, such as `"question"`.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.by_name: dict[str, Subject] = {}

    def register(
        self, name: str, help: str, takes: tuple[str, ...], needs: tuple[str, ...] = ()
    ) -> Callable[[Work], Work]:
        """Register the function that does the work of a subject.

        Args:
            name: Name of the subject.
            help: Line of the help about the subject.
            takes: Names of the options that the subject takes, besides the options that all subjects take.
            needs: Names of the options that the subject requires. Default: none.
        """

        def register(work: Work) -> Work:
            self.by_name[name] = Subject(help, takes, needs, work)
            return work

        return register

    def command(self, app: typer.Typer, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that makes a function the only command of `app`; its help lists the subjects.

        Args:
            app: An empty command line, as `command_line` returns it.
            help: Text of the help above the list.
        """

        class Command(TyperCommand):
            """A command whose messages name the subject behind the command's name."""

            subjects = self.by_name

        width = max(map(len, self.by_name))
        listed = "\n".join(f"  {name:<{width}}  {subject.help}" for name, subject in self.by_name.items())
        return app.command(cls=Command, help=f"{help}\n\n\b\n{listed}")

    def argument(self) -> Any:
        """Return the annotation of the command's first argument, the name of a subject."""
        argument = typer.Argument(
            metavar=self.kind.upper(),
            help="One of the list above.",
            callback=self._known,
            autocompletion=lambda: list(self.by_name),
        )
        return Annotated[str, argument]

    def check_options(self, context: typer.Context, name: str, options: type, always: tuple[str, ...]) -> None:
        """Check that a subject has the options that it needs, and no options of other subjects.

        Args:
            context: Context of the command.
            name: Name of the subject.
            options: Dataclass whose fields are the command's options.
            always: Names of options that every subject takes.

        Raises:
            ValueError: If an option is missing, or belongs to another subject.
        """
        subject = self.by_name[name]
        fields: Any = dataclasses.fields(options)
        present = {
            field.name
            for field in fields
            if (source := context.get_parameter_source(field.name)) is not None and source.name == "COMMANDLINE"
        }
        for option in sorted(present - {*always, *subject.takes}):
            others = " and ".join(other for other, each in self.by_name.items() if option in each.takes)
            raise ValueError(f"{_words(option)} is an option of {others}; leave it out.")
        for option in subject.needs:
            if option not in present:
                raise ValueError(f"{_words(option)} is missing; {name} needs it.")

    def _known(self, name: str) -> str:
        """Return `name` if it is a subject, or raise an error that suggests the nearest name."""
        if name in self.by_name:
            return name
        near = difflib.get_close_matches(name, self.by_name, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Expected one of: {', '.join(self.by_name)}."
        raise typer.BadParameter(f"No such {self.kind} {name!r}. {hint}")


def _words(option: str) -> str:
    return f"--{option.rstrip('_').replace('_', '-')}"
