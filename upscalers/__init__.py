"""Upscale pretrained checkpoints: add memory or depth without changing what they compute."""

from upscalers.engine.errors import MethodError, PushError, RequestError, VerificationError
from upscalers.engine.report import UpscaleReport
from upscalers.engine.run import upscale
from upscalers.engine.strip import strip

__all__ = ["MethodError", "PushError", "RequestError", "UpscaleReport", "VerificationError", "strip", "upscale"]
