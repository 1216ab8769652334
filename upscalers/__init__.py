"""Upscaling of pretrained checkpoints: memory or depth, mostly without changing what they compute."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upscalers.record.provenance import PushError, UpscaleReport
    from upscalers.request import MethodError, VerificationError
    from upscalers.runs.strip import strip
    from upscalers.runs.upscale import upscale

__all__ = ["MethodError", "PushError", "UpscaleReport", "VerificationError", "strip", "upscale"]

# Imported on first use, so that `upscale --help` does not import the methods.
_MODULES = {
    "MethodError": "upscalers.request",
    "PushError": "upscalers.record.provenance",
    "UpscaleReport": "upscalers.record.provenance",
    "VerificationError": "upscalers.request",
    "strip": "upscalers.runs.strip",
    "upscale": "upscalers.runs.upscale",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
