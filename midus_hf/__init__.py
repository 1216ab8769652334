"""Code to run, train and measure models that `upscalers` has upscaled.

Importing this package makes model types such as `midus_llama` known to the Auto classes of transformers
(`config/lazy_registration.py`), without importing transformers or torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError
from midus_hf.config.lazy_registration import register_lazily
from midus_hf.version import __version__

if TYPE_CHECKING:
    from midus_hf import memories, models

__all__ = ["RequestError", "__version__", "memories", "models"]


def __getattr__(name: str) -> Any:
    if name in ("memories", "models"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_lazily()
