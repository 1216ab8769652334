"""Supervised fine-tuning: formats of chats, labels of answers, and the run on TRL's trainer.

TRL is imported only when a name that needs it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from midus_hf.sft.options import SftConfig

if TYPE_CHECKING:
    from midus_hf.sft.run import finetune

_MODULE_OF = {"finetune": "run"}

__all__ = ["SftConfig", "finetune"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
