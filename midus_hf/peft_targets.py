"""PEFT's default target modules for our model types: those of the family that each is made from.

PEFT looks them up by `model_type` in tables of its own. They are filled in as soon as PEFT is imported, before or after
this package, which by itself does not import it.
"""

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from midus_hf.models import FAMILIES

_TABLES = "peft.utils.constants"
_TABLE_NAMES = ("TRANSFORMERS_MODELS_TO_", "_TARGET_MODULES_MAPPING")


def register_targets() -> None:
    """Fill in PEFT's tables if it has been imported, and otherwise when it will be."""
    tables = sys.modules.get(_TABLES)
    if tables is not None:
        _fill(tables)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _fill(tables: ModuleType) -> None:
    """Enter our model types into every table that knows the family; what a table says of them already stays."""
    first, last = _TABLE_NAMES
    for name, table in vars(tables).items():
        if name.startswith(first) and name.endswith(last):
            for base_type, causal_lm in FAMILIES.items():
                config_class = causal_lm.config_class
                assert config_class is not None
                if base_type in table:
                    table.setdefault(config_class.model_type, table[base_type])


class _WhenImported(MetaPathFinder):
    """Finds nothing itself: it lets others find the module with PEFT's tables, and fills them once it has run."""

    def __init__(self) -> None:
        self._finding = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TABLES or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    run(module)
    _fill(module)
