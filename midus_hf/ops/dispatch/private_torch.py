"""Private functions of torch that may change, checked with 2.11 to 2.14; named in no other file.

Each function here has a fallback for a torch that lacks the private one, with the same results, more slowly.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_is_included: Any = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", None)
_keys: Any = getattr(torch._C, "DispatchKey", None)
_before_dispatch: Any = getattr(_keys, "PreDispatch", None)
_transform: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_tracing: Any = getattr(torch._C, "_get_tracing_state", None)
# `PreDispatch` is included while modes trace calls before autograd sees them; `_modes` does not count these modes.
_KNOWS_WATCHERS = None not in (_modes, _is_included, _before_dispatch, _transform, _tracing) and hasattr(
    forward_ad, "_current_level"
)


def can_skip_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call may bypass its registered op, which takes longer than a decoding step.

    It may if no gradient is recorded, no graph is traced, nothing intercepts calls (dispatch modes, transforms of `torch.func`,
    tracers), and C and kernels can read the memory of all tensors, which a subclass of `Tensor` may not have. Fallback: false.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not _KNOWS_WATCHERS
        or _modes()
        or _is_included(_before_dispatch)
        or _transform() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
_graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)


def is_in_backward() -> bool:
    """Return whether a backward pass runs. Fallback: false, so repeated forward passes count twice."""
    return not torch.compiler.is_compiling() and _graph_task is not None and _graph_task() != -1


_static: Any = getattr(torch._dynamo, "mark_static_address", None) if hasattr(torch, "_dynamo") else None


def keep_address(tensor: torch.Tensor, guard: bool = True) -> None:
    """Make captured graphs read a tensor at its lasting address. Fallback: each replay copies it.

    `guard`: whether code is recompiled for another tensor. Default: true.
    """
    if _static is not None:
        _static(tensor, guard=guard)
