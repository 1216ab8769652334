"""When a registered op may be passed by, and its body called: what registration adds takes longer than a decoding step's work."""

import torch
from torch.autograd import forward_ad

_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
"""Included where modes of a stack of its own trace what is called, before autograd has seen it."""


def nobody_watches() -> bool:
    """Whether no gradient is recorded, no graph is traced, and nothing stands between calls and what they compute.

    Modes of dispatch (fake tensors, counters of operations) and transforms of `torch.func` see registered ops alone.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BEFORE_DISPATCH)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or differentiation in forward mode goes on, for which registered ops have no rule.

    A graph that is traced has none: what it holds is differentiated backward.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether tensors have memory of their own that C and kernels can read: those of a subclass may stand for others."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
