"""Supervised fine-tuning: rows of instruction data become chats, chats become tokens with labels, and TRL trains on them.

TRL is imported only when a name that needs it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midus_hf.training.sft.arguments import SftArguments
    from midus_hf.training.sft.run import finetune

_MODULE_OF = {"SftArguments": "arguments", "finetune": "run"}

__all__ = ["SftArguments", "finetune"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
