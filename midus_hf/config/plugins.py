"""What other packages offer: methods, memories and families, by their entry points."""

import warnings
from importlib.metadata import EntryPoint, entry_points

_loaded: set[tuple[str, str]] = set()


def load_offered(group: str, refuse: bool = True) -> None:
    """Import what installed packages offer under a group of entry points, each once; importing it registers it.

    Args:
        group: `midus_hf.config.memories` (options of memory types), `midus_hf.memories` (their modules), `midus_hf.families`,
            `upscalers.methods` or `upscalers.families`.
        refuse: Whether something that cannot be imported is an error; if not, it is a warning, and the others are imported.
            Default: true.

    Raises:
        ValueError: If something that is offered cannot be imported; names it and its package.
    """
    for offered in entry_points(group=group):
        if (group, offered.value) not in _loaded:
            try:
                _load(group, offered)
            except ValueError as error:
                if refuse:
                    raise
                warnings.warn(str(error), stacklevel=2)
            else:
                _loaded.add((group, offered.value))


def is_same_class(first: type, second: type) -> bool:
    """Whether two classes have one definition, which may have run twice, as the cell of a notebook does."""
    return (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)


def _load(group: str, offered: EntryPoint) -> None:
    try:
        offered.load()
    except Exception as error:
        package = offered.dist.name if offered.dist else "a package"
        raise ValueError(
            f"{package} offers {offered.value} under {group}, which cannot be imported ({type(error).__name__}: {error}). Update or "
            "uninstall it."
        ) from error
