"""Marks for code that differs between the installed package and the module of code that a checkpoint carries."""

from collections.abc import Callable
from typing import TypeVar

# True in the installed package. `midus_hf.carried` takes this for false when it writes the code of a checkpoint, and
# keeps only the branches that then run.
INSTALLED: bool = True

Definition = TypeVar("Definition")


def not_carried(definition: Definition) -> Definition:
    """Return a class, method or function unchanged. The code that a checkpoint carries does not have the definition."""
    return definition


def needed_for(*needs: str) -> Callable[[Definition], Definition]:
    """Return a decorator that leaves a class or method unchanged.

    A checkpoint carries the class or method only if its memories have one of the needs.

    Args:
        needs: Names of fields or properties of `midus_hf.memory.needs.Needs`.
    """

    def decorate(definition: Definition) -> Definition:
        return definition

    return decorate
