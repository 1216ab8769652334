"""Requests and answers: errors that are shown to users, options as given, and the display of progress."""

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.config.options import read_options

_LONGEST_REASON = 400


class MethodError(RuntimeError):
    """Error for a method that breaks its contract, not a wrong request; nothing was written."""


class VerificationError(RuntimeError):
    """Error for a result that does not do what the method promises."""


def one_line(error: BaseException) -> str:
    """Return another library's error message as one line of at most 400 characters."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")


_SEEDS = 2**63
_OF_THE_COMMAND = {"layers": "placement", "num_new_layers": "num-new-layers"}
_OF_THE_COMMAND |= {name: name for name in ("placement", "seed", "dtype")}


def parse_options(options_class: type, values: Mapping[str, Any], subject: str) -> Any:
    """Read options as `read_options` of `midus_hf.config` does; messages name the command's option."""
    fields = {field.name for field in dataclasses.fields(options_class)}
    for key in values.keys() & _OF_THE_COMMAND.keys() - fields:
        raise RequestError(
            f"{subject} has no option {key!r}. It is an option of the command: --{_OF_THE_COMMAND[key]}."
        )
    return read_options(options_class, values, subject)


def check_seed(seed: Any) -> None:
    """Raise `RequestError` if a seed, of any type, is not an integer from 0 to 2^63 - 1."""
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise RequestError(f"seed is {seed!r}; expected an integer from 0 to {_SEEDS - 1}.")


class Progress:
    """Progress that shows nothing; a subclass shows stages that follow each other."""

    def start(self) -> None:
        """Start showing progress, when the work begins."""

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        """Begin the next stage, which has `num_steps` steps; `unit` may be `"bytes"`."""

    def advance(self, num_steps: int = 1) -> None:
        """Count `num_steps` more steps of the stage as done."""

    def warn(self, message: str) -> None:
        """Show a warning."""

    def note(self, message: str) -> None:
        """Show a message to the user."""

    def finish(self) -> None:
        """Stop showing progress, when all work is done or has failed."""


@contextlib.contextmanager
def show_progress(progress: Progress) -> Iterator[None]:
    progress.start()
    try:
        yield
    finally:
        progress.finish()
