"""What tells the installed package from the module of code that a checkpoint carries."""

from collections.abc import Callable
from typing import TypeVar

INSTALLED: bool = True
"""Whether this is the installed package. `midus_hf.carried` reads it as false: the code that it writes has what branches do then."""

Definition = TypeVar("Definition")


def not_carried(definition: Definition) -> Definition:
    """Return a class, a method or a function as it is; the code that a checkpoint carries is written without it."""
    return definition


def needed_for(*needs: str) -> Callable[[Definition], Definition]:
    """Return a decorator that leaves a class or a method as it is; a checkpoint's code has it only if its memories need one of these.

    Args:
        needs: Names of fields of `midus_hf.memory.needs.Needs`.
    """

    def decorate(definition: Definition) -> Definition:
        return definition

    return decorate


def used_by_libraries(definition: Definition) -> Definition:
    """Return a class as it is; a checkpoint's code has all of its members, which libraries use though they know nothing of it."""
    return definition
