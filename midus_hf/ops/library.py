"""Registration of ops with torch."""

import hashlib
from collections.abc import Callable

import torch

_PACKAGE = "midus_hf"


def custom_op(name: str) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Register a function with `torch.library`, so that a compiled graph holds it as one node.

    A checkpoint brings a copy of this code, and a process may load several beside the installed package. Registering a
    name again would disable the op that had it, so each copy has a namespace of its own.
    """

    def decorate(function: Callable) -> torch.library.CustomOpDef:
        parent = function.__module__.rpartition(".")[0]
        copied = parent.partition(".")[0] != _PACKAGE
        suffix = f"_{hashlib.sha256(parent.encode()).hexdigest()[:12]}" if copied else ""
        return torch.library.custom_op(f"{_PACKAGE}{suffix}::{name}", mutates_args=())(function)

    return decorate
