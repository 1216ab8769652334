"""Upscaling of pretrained checkpoints: it adds memory or depth, and most methods do not change what the model computes."""

from upscalers.record.report import PushError, UpscaleReport
from upscalers.request.errors import MethodError, RequestError, VerificationError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

__all__ = ["MethodError", "PushError", "RequestError", "UpscaleReport", "VerificationError", "strip", "upscale"]
