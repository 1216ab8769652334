"""Registration of ops with torch, and tests for whether a call may bypass the registered op.

The overhead of a registered op takes longer than the work of a decoding step.
"""

from collections.abc import Callable

import torch

from midus_hf.ops.dispatch.private_torch import calls_are_seen

# Name of the package that this module lies in: `midus_hf`, or a copy's, whose ops are registered beside those of `midus_hf`.
_NAMESPACE = __name__.partition(".")[0]


def custom_op(name: str) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Return a decorator that registers a function as `midus_hf::name`, so that a compiled graph holds it as one node."""
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", mutates_args=())


def nobody_watches() -> bool:
    """Return whether no gradient is recorded, no graph is traced, and nothing intercepts calls.

    Dispatch modes (fake tensors, counters of operations) and transforms of `torch.func` intercept registered ops only.
    """
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or calls_are_seen())


def are_plain(*tensors: torch.Tensor) -> bool:
    """Return whether C and kernels can read the memory of all tensors: a subclass of `Tensor` may have no memory."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
