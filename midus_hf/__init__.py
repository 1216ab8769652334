"""Code to run, train and measure models that `upscalers` has upscaled.

Importing this package registers every config and model with the Auto classes of transformers: at once if the Auto classes are loaded,
otherwise as soon as they are. Until then neither torch nor transformers is imported, so `midus_hf.config` and `midus_hf.files` are
imported in milliseconds.
"""

import gc
import importlib
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from midus_hf.version import __version__

if TYPE_CHECKING:
    from midus_hf import memory, models

__all__ = ["__version__", "memory", "models"]

_AUTO = "transformers.models.auto."
_WATCHED = ("transformers.", f"{__name__}.")


def __getattr__(name: str) -> Any:
    if name in ("memory", "models"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    """Register every config and model with the Auto classes, and stop watching imports."""
    _unwatch()
    collects = gc.isenabled()
    gc.disable()  # all definitions of torch and transformers stay alive: one collection afterwards is enough
    try:
        importlib.import_module(f"{__name__}.models")
    finally:
        if collects:
            gc.enable()


def _is_watched() -> bool:
    return any(type(finder).__module__ == __name__ for finder in sys.meta_path)


def _unwatch() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]


class _Watcher:
    """A finder that registers once the Auto classes are loaded and no import of transformers or of this package is unfinished.

    Registration imports much of both packages, and must not meet a module whose own import is still waiting for the Auto classes.
    """

    def __init__(self) -> None:
        # The attribute `depth` is the number of nested imports that are running in a thread.
        self.imports = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not f"{name}.".startswith(_WATCHED):
            return None
        # All finders behind this one are called, not only Python's own, since other packages' import hooks are among them.
        finders: list[Any] = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        specs = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self.imports)  # type: ignore[assignment]
        return spec


class _WatchedLoader:
    """A loader that counts the running imports, and registers after the outermost one."""

    def __init__(self, loader: Any, imports: threading.local):
        self._loader = loader
        self._imports = imports

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        depth = getattr(self._imports, "depth", 0)
        self._imports.depth = depth + 1
        try:
            self._loader.exec_module(module)
        finally:
            self._imports.depth = depth
        if depth == 0 and _auto_classes_are_loaded() and _is_watched():
            _register()


def _auto_classes_are_loaded() -> bool:
    return any(name.startswith(_AUTO) for name in list(sys.modules))


_unwatch()  # removes the finder of an earlier load, if this module is reloaded
if _auto_classes_are_loaded():
    _register()
else:
    sys.meta_path.insert(0, _Watcher())  # type: ignore[arg-type]
