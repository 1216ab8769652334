"""Private functions of torch that this package uses, which torch does not promise to keep: seen in torch 2.11, 2.12 and 2.13.

No other file of the package names a private function of the module `torch`. Each function here has a fallback for a
torch that lacks the private one; the fallback gives the same results more slowly.
"""

from typing import Any

import torch
from torch.autograd import forward_ad


def _of(module: Any, name: str) -> Any:
    """Return the attribute `name` of a module, or None."""
    return getattr(module, name, None)


def _aten(name: str) -> Any:
    """Return the operator `torch.ops.aten.NAME`, or None."""
    return getattr(torch.ops.aten, name, None)


_modes = _of(torch._C, "_len_torch_dispatch_stack")
_is_included = _of(torch._C, "_dispatch_tls_is_dispatch_key_included")
_keys = _of(torch._C, "DispatchKey")
_before_dispatch = _of(_keys, "PreDispatch")
_transform = _of(_of(torch._C, "_functorch"), "peek_interpreter_stack")
_tracing = _of(torch._C, "_get_tracing_state")
# Whether torch has every private function that `calls_are_seen` calls. `PreDispatch` is included while modes trace
# calls before autograd sees them; `_modes` does not count these modes.
_KNOWS_WATCHERS = None not in (_modes, _is_included, _before_dispatch, _transform, _tracing) and hasattr(
    forward_ad, "_current_level"
)


def calls_are_seen() -> bool:
    """Return whether something intercepts calls: dispatch modes, transforms of `torch.func` or tracers.

    Fallback: true, so that registered ops are never bypassed.
    """
    if not _KNOWS_WATCHERS:
        return True
    return bool(
        _modes()
        or _is_included(_before_dispatch)
        or _transform() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active; registered ops have no rule for either.

    While a graph is traced the answer is false: a graph is differentiated backward. Fallback: false, so that torch
    raises an error for ops without a rule.
    """
    if torch.compiler.is_compiling() or not _KNOWS_WATCHERS:
        return False
    return _transform() is not None or forward_ad._current_level >= 0


_graph_task = _of(torch._C, "_current_graph_task_id")


def is_in_backward() -> bool:
    """Return whether a backward pass runs, within which activation checkpointing repeats forward passes.

    Fallback: false, so that counters of a forward pass count a repeated pass twice.
    """
    return not torch.compiler.is_compiling() and _graph_task is not None and _graph_task() != -1


_static = _of(torch._dynamo, "mark_static_address") if hasattr(torch, "_dynamo") else None


def keep_address(tensor: torch.Tensor, guard: bool = True) -> None:
    """Let captured graphs read a tensor at its address, as they read parameters. Fallback: each replay copies the tensor.

    Args:
        tensor: A tensor whose address will not change.
        guard: Whether code is compiled again when it meets another tensor. Default: true.
    """
    if _static is not None:
        _static(tensor, guard=guard)


_bag_weights_backward = _aten("_embedding_bag_per_sample_weights_backward")

# Elements of gathered rows that the fallback holds at a time: 64 MB in float32.
_MOST_GATHERED = 1 << 24


def products_with_bags(
    gradient: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, bags: torch.Tensor
) -> torch.Tensor:
    """Return `<gradient[bags[i]], rows[places[i]]>` for each i: the gradient of the weights of `embedding_bag` in mode "sum".

    Fallback: rows are gathered, some at a time.

    Args:
        gradient: Gradient of the output of each bag, `[S, v]`, contiguous.
        rows: The table, `[R, v]`, in the dtype of the gradient.
        places: Row number of each weight, `[N]`, int64.
        bags: Bag number of each weight, `[N]`, int64.

    Returns:
        `[N]`, in the dtype of the gradient.
    """
    if _bag_weights_backward is not None:
        starts = torch.zeros(1, dtype=torch.int64, device=places.device)  # a dummy: `bags` tells the bag of each row
        return _bag_weights_backward(gradient, rows, places, starts, bags, 0)
    stretch = max(1, _MOST_GATHERED // max(1, rows.shape[1]))
    pairs = zip(places.split(stretch), bags.split(stretch), strict=True)
    return torch.cat([(rows[row_numbers] * gradient[bag]).sum(-1) for row_numbers, bag in pairs])
