"""Upscale pretrained checkpoints: add memory or depth without changing what they compute."""

from upscalers.record.report import PushError, UpscaleReport
from upscalers.request.errors import MethodError, RequestError, VerificationError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

__all__ = ["MethodError", "PushError", "RequestError", "UpscaleReport", "VerificationError", "strip", "upscale"]
