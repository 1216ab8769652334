"""Attention to the sequence joined with attention to the depth, and which way is taken to compute both."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from midus_hf.ops.backend import chosen_depth_path, resolve
from midus_hf.ops.depth_attention import depth_attention
from midus_hf.ops.fused_depth import fused_attention, fused_refusal
from midus_hf.ops.fused_sequence import joined
from midus_hf.ops.plain.depth import joint_attention
from midus_hf.ops.precision import shared_dtype
from midus_hf.ops.sequence_kernels import Call, kernel_of
from midus_hf.ops.sequence_lse import sequence_lse

_RUNS = 5
"""Of each way, in turns, whose median counts; the first of all compiles, and does not."""


class Depth(NamedTuple):
    """What heads read of the depth, and how much of it.

    Args:
        query: `[B, H, T, d]`, what is compared with the slots.
        keys: n of `[B, K, T, d]`.
        values: n of `[B, K, T, d]`.
        scaling: By what scores are multiplied.
        softcap: What no score exceeds; None if they are not capped.
        gate: `[H]`, c of `joint_attention`; None for 1.
        added: Whether heads read 1 - c of the depth besides.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scaling: float
    softcap: float | None = None
    gate: torch.Tensor | None = None
    added: bool = False

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what heads read `[B, H, T, d]`, its logarithms of sums of exponentials, and c, both `[B, H, T]`."""
        read, lse = depth_attention(self.query, self.keys, self.values, self.scaling, self.softcap)
        gate = lse.new_ones(read.shape[1]) if self.gate is None else self.gate
        return read, lse, gate[:, None].expand_as(lse)


def joined_attention(call: Call, depth: Depth) -> torch.Tensor:
    """Return what heads read of the sequence and the depth (`joint_attention`).

    Args:
        call: Of attention to the sequence.
        depth: Slots of the same positions.

    Returns:
        As the query of the call, `[B, H, T, d]`. Merged, it is what torch's own attention gives where c is 0, bit for bit, plus what
        is read of the depth if that is added.
    """
    return _WAYS[_chosen(call, depth)](call, depth)


def _merged(call: Call, depth: Depth) -> torch.Tensor:
    """By torch's attention and that to the depth, one after the other.

    transformers may give a single token's query heads that share a key head as if they were tokens.
    """
    shape = call.query.shape
    read, *rows = depth.read()
    read, (lse, gate) = read.reshape(shape), (part.reshape(shape[:3]) for part in rows)
    kernel = kernel_of(call)
    if kernel is not None:
        return joined(kernel, call, read, lse, gate, depth.added)
    output = F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
    own = sequence_lse(call.query, call.key, call.attn_mask, call.is_causal, call.scaling)
    return joint_attention(output, own, read, lse, gate, depth.added)


def _fused(call: Call, depth: Depth) -> torch.Tensor:
    """By one kernel of this project."""
    return fused_attention(
        *(call.query, call.key, call.value, depth.keys, depth.values, call.scaling, call.is_causal),
        *(depth.gate, depth.added),
    )


_WAYS: dict[str, Callable[[Call, Depth], torch.Tensor]] = {"merged": _merged, "fused": _fused}


def _chosen(call: Call, depth: Depth) -> str:
    way = chosen_depth_path()
    if way == "merged" or not _may_be_fused(call, depth):
        return "merged"
    if way == "fused":
        return "fused"
    case = _case(call, depth)
    if case not in _FASTER:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # nothing can be waited for
            return "merged"
        _FASTER[case] = _faster(call, depth)
    return _FASTER[case]


def _may_be_fused(call: Call, depth: Depth) -> bool:
    if call.attn_mask is not None or call.dropout_p or depth.softcap is not None or depth.query is not call.query:
        return False
    if chosen_depth_path() == "measured" and torch.compiler.is_compiling():  # nothing can be timed, nor looked up
        return False
    tensors = (call.query, call.key, call.value, depth.keys, depth.values)
    if fused_refusal(*tensors) is not None:
        return False
    dtype = shared_dtype(*tensors[:3], *depth.keys, *depth.values)
    return resolve("auto", "auto", "auto", call.query.to(dtype)).backend == "triton"


_FASTER: dict[tuple, str] = {}
"""What was measured in this process, by what decides how long it takes."""


def _case(call: Call, depth: Depth) -> tuple:
    tensors = (call.query, call.key, call.value, depth.keys[0], depth.values[0], depth.gate)
    return (
        call.is_causal,
        depth.added,
        len(depth.keys),
        torch.is_grad_enabled(),
        call.query.device,
        *(None if part is None else (part.shape, part.dtype, part.requires_grad) for part in tensors),
    )


def _faster(call: Call, depth: Depth) -> str:
    """The way that takes less time for these tensors, with the gradient if one is wanted."""
    taken: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(1 + _RUNS):
        for way, times in taken.items():
            times.append(_milliseconds(way, call, depth))
    return min(taken, key=lambda way: statistics.median(taken[way][1:]))


def _milliseconds(way: str, call: Call, depth: Depth) -> float:
    """Of one run on leaves of its own, which share memory with the tensors that are given."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled()))
        return leaves[-1]

    own_call = call._replace(query=leaf(call.query), key=leaf(call.key), value=leaf(call.value))
    own_depth = depth._replace(
        query=own_call.query,
        keys=[leaf(key) for key in depth.keys],
        values=[leaf(value) for value in depth.values],
        gate=None if depth.gate is None else leaf(depth.gate),
    )
    clock = _Clock(call.query)
    output = _WAYS[way](own_call, own_depth)
    if output.requires_grad:
        torch.autograd.grad(output, [one for one in leaves if one.requires_grad], output.detach())
    return clock.milliseconds()


class _Clock:
    """Milliseconds since it was made: of the device on a GPU, which is waited for."""

    def __init__(self, tensor: torch.Tensor):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if tensor.is_cuda else []
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def milliseconds(self) -> float:
        if not self._events:
            return 1e3 * (time.perf_counter() - self._began)
        self._events[1].record()
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])
