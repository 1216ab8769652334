"""Registration of ops with torch, and when a registered op may be passed by.

What registration adds to a call takes longer than a decoding step's work.
"""

from collections.abc import Callable

import torch

from midus_hf.ops.dispatch.private_torch import calls_are_seen


def custom_op(name: str) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Return a decorator that registers a function as `midus_hf::name`, so that a compiled graph holds it as one node.

    Args:
        name: Of the op.
    """
    return torch.library.custom_op(f"midus_hf::{name}", mutates_args=())


def nobody_watches() -> bool:
    """Return whether no gradient is recorded, no graph is traced, and nothing stands between calls and what they compute.

    Modes of dispatch (fake tensors, counters of operations) and transforms of `torch.func` see registered ops alone.
    """
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or calls_are_seen())


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether tensors have memory of their own that C and kernels can read: those of a subclass may stand for others."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
