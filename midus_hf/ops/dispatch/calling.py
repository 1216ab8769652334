"""Registration of ops with torch."""

from collections.abc import Callable

import torch

# Name of the package of this module: `midus_hf`, or that of a copy, whose ops are registered in addition to those of `midus_hf`.
_NAMESPACE = __name__.partition(".")[0]


def custom_op(name: str) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Return a decorator that registers a function as `midus_hf::name`, so that a compiled graph holds it as one node."""
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", mutates_args=())
