"""What other packages offer: methods, memories and families, by their entry points."""

from importlib.metadata import EntryPoint, entry_points

_loaded: set[tuple[str, str]] = set()


def load_offered(group: str) -> None:
    """Import what installed packages offer under a group of entry points, each once; importing it registers it.

    Args:
        group: `midus_config.memories` (options of memory types), `midus_hf.memories` (their modules), `midus_hf.families`,
            `upscalers.methods` or `upscalers.families`.

    Raises:
        ValueError: If something that is offered cannot be imported; names it and its package.
    """
    for offered in entry_points(group=group):
        if (group, offered.value) not in _loaded:
            _load(group, offered)
            _loaded.add((group, offered.value))


def _load(group: str, offered: EntryPoint) -> None:
    try:
        offered.load()
    except Exception as error:
        package = offered.dist.name if offered.dist else "a package"
        raise ValueError(
            f"{package} offers {offered.value} under {group}, which cannot be imported ({type(error).__name__}: {error}). Update or "
            "uninstall it."
        ) from error
