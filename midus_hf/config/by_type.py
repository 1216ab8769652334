"""Functions that choose what they do by the type of their first argument, such as what a memory costs by its options."""

from collections.abc import Callable
from typing import Any


class ByType:
    """A function with one body per class of its first argument, and a default for all other classes.

    It decorates the default. A module that has a body for another class registers it: `@function.register(Class)`, or
    `@function.register` if the first argument is annotated with the class. The body of the nearest class in the method
    resolution order runs. Unlike `functools.singledispatch`, the function can be pickled by value.

    Args:
        default: Body for classes that have registered no other.
    """

    def __init__(self, default: Callable[..., Any]):
        self._bodies: dict[type, Callable[..., Any]] = {object: default}
        self.__doc__, self.__name__ = default.__doc__, default.__name__

    def __call__(self, subject: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the body for the class of `subject`."""
        return self.dispatch(type(subject))(subject, *args, **kwargs)

    def dispatch(self, cls: type) -> Callable[..., Any]:
        """Return the body for a class."""
        return next(self._bodies[each] for each in cls.__mro__ if each in self._bodies)

    def register(self, target: Any) -> Any:
        """Register a body for a class: return the decorator for a class, or, for a body, the body itself."""
        if isinstance(target, type):
            return lambda body: self._registered(target, body)
        return self._registered(next(iter(target.__annotations__.values())), target)

    def _registered(self, cls: type, body: Callable[..., Any]) -> Callable[..., Any]:
        self._bodies[cls] = body
        return body

    def has(self, cls: type) -> bool:
        """Return whether a class, or one that it extends, has registered a body."""
        return self.dispatch(cls) is not self._bodies[object]
