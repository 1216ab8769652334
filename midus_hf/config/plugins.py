"""Plugins: methods, memories and families of other packages, found by their entry points."""

import warnings
from importlib.metadata import entry_points

from midus_hf.config.errors import RequestError

GROUPS = ("midus_hf.memories", "midus_hf.families", "upscalers.methods")

_loaded: set[tuple[str, str]] = set()


def load_plugins(group: str, refuse: bool = True) -> None:
    """Import, and so register, the plugins under a group of entry points, one of `GROUPS`, each once.

    Raises:
        RequestError: If a plugin cannot be imported; with `refuse` false a warning is given, and the others are imported.
    """
    for offered in entry_points(group=group):
        if (group, offered.value) in _loaded:
            continue
        try:
            offered.load()
        except Exception as error:
            package = offered.dist.name if offered.dist else "a package"
            message = (
                f"{package} offers {offered.value} under {group}, which cannot be imported ({type(error).__name__}: {error}). Update "
                "or uninstall it."
            )
            if refuse:
                raise RequestError(message) from error
            warnings.warn(message, stacklevel=2)
        else:
            _loaded.add((group, offered.value))


def plugin_packages() -> set[str]:
    """Return the names of the top-level packages that plugins are in."""
    return {offered.module.partition(".")[0] for group in GROUPS for offered in entry_points(group=group)}


def is_same_class(first: type, second: type) -> bool:
    """Return whether two classes have the same definition, perhaps executed twice, as in a notebook."""
    return (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)
