"""Registration of types such as `midus_llama` with Auto classes, without importing transformers.

`AutoConfig.register` would import transformers and torch, which takes seconds. So a finder on `sys.meta_path` waits until something
else imports the module of transformers that has the table of types, and then puts a mapping into the table that imports the classes
of a type when a config names it.
"""

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from midus_hf.version import __version__

_TABLE = "transformers.models.auto.configuration_auto"


class _Types(dict):
    """Config classes by type, added to those of transformers: a type's classes are made when looked up."""

    def __contains__(self, model_type: object) -> bool:
        if isinstance(model_type, str) and model_type.startswith("midus_") and not super().__contains__(model_type):
            importlib.import_module("midus_hf.models").host_named_type(model_type)
        return super().__contains__(model_type)

    def __missing__(self, model_type: str) -> Any:
        if model_type in self:
            return self[model_type]
        raise KeyError(model_type)


class _Finder:
    """A finder of the module with the table; replaces the table's extra content once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        # All other finders are called, not only Python's own, since other packages' import hooks are among them.
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            load = loader.exec_module

            def load_and_extend(module: ModuleType) -> None:
                del loader.exec_module  # a loader may load other modules too
                load(module)
                _extend(module)

            loader.exec_module = load_and_extend  # type: ignore[method-assign]
        return spec


def _extend(table: ModuleType) -> None:
    _stop_waiting()
    # The extra content has no public name (seen in transformers 5.17 to 5.24).
    content = getattr(table.CONFIG_MAPPING, "_extra_content", None)
    if isinstance(content, dict):
        table.CONFIG_MAPPING._extra_content = _Types(content)
    else:
        warnings.warn(
            f"midus_hf {__version__} does not find where this version of transformers keeps further types, so AutoModel knows no "
            "type with memory; import midus_hf.models for the families, or install a version of transformers that was tried.",
            stacklevel=2,
        )


def _stop_waiting() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]


def register_lazily() -> None:
    """Let Auto classes know types with memory, now if the table is loaded, else as soon as it is."""
    _stop_waiting()  # removes the finder of an earlier load, if this package is reloaded
    # The import waits for a thread that is loading the table.
    table = importlib.import_module(_TABLE) if _TABLE in sys.modules else None
    if table is not None and hasattr(table, "CONFIG_MAPPING"):
        _extend(table)
    else:
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
