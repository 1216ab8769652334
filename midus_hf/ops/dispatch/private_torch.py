"""What this package uses of torch that torch does not promise to keep: seen in torch 2.11, 2.12 and 2.13.

No other file of the package names a private function of the module `torch`. Each has a fallback for a torch that lacks it, which
gives the same results and is slower.
"""

from typing import Any

import torch
from torch.autograd import forward_ad


def _of(module: Any, name: str) -> Any:
    """Return what a module has by a name, or None."""
    return getattr(module, name, None)


def _aten(name: str) -> Any:
    """Return an operator of torch, or None."""
    return getattr(torch.ops.aten, name, None)


_modes = _of(torch._C, "_len_torch_dispatch_stack")
_is_included = _of(torch._C, "_dispatch_tls_is_dispatch_key_included")
_keys = _of(torch._C, "DispatchKey")
_before_dispatch = _of(_keys, "PreDispatch")
_transform = _of(_of(torch._C, "_functorch"), "peek_interpreter_stack")
_tracing = _of(torch._C, "_get_tracing_state")
_KNOWS_WATCHERS = None not in (_modes, _is_included, _before_dispatch, _transform, _tracing) and hasattr(
    forward_ad, "_current_level"
)
"""`PreDispatch` is included where modes of a stack of its own trace what is called, before autograd has seen it."""


def calls_are_seen() -> bool:
    """Return whether something stands between calls and what they compute: modes of dispatch, transforms of `torch.func`, tracers.

    Fallback: yes, so that registered ops are never passed by.
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
    """Return whether a transform of `torch.func` or differentiation in forward mode goes on, for which registered ops have no rule.

    A graph that is traced has none: what it holds is differentiated backward. Fallback: no, and torch refuses what has no rule.
    """
    if torch.compiler.is_compiling() or not _KNOWS_WATCHERS:
        return False
    return _transform() is not None or forward_ad._current_level >= 0


_graph_task = _of(torch._C, "_current_graph_task_id")


def is_in_backward() -> bool:
    """Return whether a backward pass runs, as activation checkpointing repeats a forward pass within it.

    Fallback: no, so that what a forward pass counts is counted twice where it is repeated.
    """
    return not torch.compiler.is_compiling() and _graph_task is not None and _graph_task() != -1


_static = _of(torch._dynamo, "mark_static_address") if hasattr(torch, "_dynamo") else None


def keep_address(tensor: torch.Tensor, guard: bool = True) -> None:
    """Let captured graphs read a tensor where it lies, as they read parameters. Fallback: each replay copies the tensor.

    Args:
        tensor: That stays where it is.
        guard: Whether compiled code is compiled anew for another tensor. Default: true.
    """
    if _static is not None:
        _static(tensor, guard=guard)


_chosen_attention = _of(torch, "_fused_sdp_choice")


def chosen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int | None:
    """Return the number of the backend that `scaled_dot_product_attention` takes for a call without dropout, as in `SDPBackend`.

    Fallback: None.
    """
    if _chosen_attention is None:
        return None
    return _chosen_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


# The operators that `scaled_dot_product_attention` calls, which tell the divisor of their softmax. Fallback: None, and the divisor is
# computed by a product of queries and keys of its own.
CPU_ATTENTION = _aten("_scaled_dot_product_flash_attention_for_cpu")
CPU_ATTENTION_BACKWARD = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")
FLASH_ATTENTION = _aten("_scaled_dot_product_flash_attention")
FLASH_ATTENTION_BACKWARD = _aten("_scaled_dot_product_flash_attention_backward")
CUDNN_ATTENTION = _aten("_scaled_dot_product_cudnn_attention")
CUDNN_ATTENTION_BACKWARD = _aten("_scaled_dot_product_cudnn_attention_backward")
EFFICIENT_ATTENTION = _aten("_scaled_dot_product_efficient_attention")
EFFICIENT_ATTENTION_BACKWARD = _aten("_scaled_dot_product_efficient_attention_backward")

_bag_weights_backward = _aten("_embedding_bag_per_sample_weights_backward")

_MOST_GATHERED = 1 << 24
"""Elements of rows that the fallback gathers at a time: 64 MB in float32."""


def products_with_bags(
    gradient: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, bags: torch.Tensor
) -> torch.Tensor:
    """Return `<gradient[bags[i]], rows[places[i]]>`: the gradient of the weights of `embedding_bag` in mode "sum".

    Fallback: rows are gathered, some at a time.

    Args:
        gradient: `[S, v]`, contiguous.
        rows: `[R, v]`, in the dtype of the gradient.
        places: `[N]`, int64.
        bags: `[N]`, int64.

    Returns:
        `[N]`, in the dtype of the gradient.
    """
    if _bag_weights_backward is not None:
        starts = torch.zeros(1, dtype=torch.int64, device=places.device)  # which bag a row is in, `bags` says
        return _bag_weights_backward(gradient, rows, places, starts, bags, 0)
    stretch = max(1, _MOST_GATHERED // max(1, rows.shape[1]))
    pairs = zip(places.split(stretch), bags.split(stretch), strict=True)
    return torch.cat([(rows[place] * gradient[bag]).sum(-1) for place, bag in pairs])
