"""Supervised fine-tuning: rows of instruction data become chats, chats become tokens with labels, and TRL trains on them.

TRL is imported only when a name that needs it is used.
"""

import importlib
from typing import Any

_MODULE_OF = {"SftArguments": "arguments", "finetune": "run"}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
