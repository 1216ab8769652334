"""Registration of ops with torch."""

from collections.abc import Callable

import torch


def custom_op(name: str) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Return a decorator that registers a function as `midus_hf::name`, so that a compiled graph holds it as one node.

    Args:
        name: Of the op.
    """
    return torch.library.custom_op(f"midus_hf::{name}", mutates_args=())
