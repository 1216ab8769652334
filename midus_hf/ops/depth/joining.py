"""Attention to the sequence joined with attention to the depth."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from midus_hf.ops.depth.op import depth_attention
from midus_hf.ops.depth.reference import joint_attention, parts_of_both, shares_of_both
from midus_hf.ops.depth.sequence_kernels import Call, Kernel, kernel_of
from midus_hf.ops.depth.sequence_lse import sequence_lse


class Depth(NamedTuple):
    """Slots of the depth, the queries that read them, and how `joint_attention` weighs the result.

    Args:
        query: Query that is compared with the keys of the slots, `[B, H, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`. Default: None, no bound.
        gate: c of `joint_attention` per query head, `[H]`. Default: None, which stands for 1.
        added: Whether `joint_attention` adds (1 - c) times what heads read of the depth. Default: false.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scaling: float
    softcap: float | None = None
    gate: torch.Tensor | None = None
    added: bool = False

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what heads read `[B, H, T, d]`, the logarithms of their sums of exponentials `[B, H, T]`, and c `[B, H, T]`."""
        read, lse = depth_attention(self.query, self.keys, self.values, self.scaling, self.softcap)
        gate = lse.new_ones(read.shape[1]) if self.gate is None else self.gate
        return read, lse, gate[:, None].expand_as(lse)


def joined_attention(call: Call, depth: Depth) -> torch.Tensor:
    """Compute attention to the depth, then torch's attention to the sequence, and join them as `joint_attention` does.

    Args:
        call: Call of attention to the sequence. For a single token, transformers may pass the query heads that share a
            key head as if they were tokens.
        depth: Slots of the same positions.

    Returns:
        `[B, H, T, d]`, in the shape of the call's query. If c is 0, this is the output of torch's own attention bit for
        bit, plus what heads read of the depth if `depth.added`.
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


def joined(
    kernel: Kernel,
    call: Call,
    depth: torch.Tensor,
    depth_lse: torch.Tensor,
    gate: torch.Tensor,
    added: bool,
) -> torch.Tensor:
    """Join what heads read of the depth with what a kernel reads of the sequence, as `joint_attention` does.

    In the backward pass, the kernel's backward operator gets another output and another divisor than its forward
    operator returned, so that it computes gradients of the joined output. If c is 1, these are the output and the
    divisor of the softmax over both.

    Args:
        kernel: Kernel that torch would run for the call.
        call: Call of attention to the sequence.
        depth: What heads read of the depth, `[B, H, T, d]`.
        depth_lse: Logarithm of the sum of exponentials of the depth, `[B, H, T]`.
        gate: c of `joint_attention`, `[B, H, T]`.
        added: Whether (1 - c) times what heads read of the depth is added.

    Returns:
        `[B, H, T, d]`, in the dtype of the query.
    """
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, kernel.excluded)
    return _Joined.apply(
        kernel,
        call.is_causal,
        call.scale,
        call.query,
        call.key,
        call.value,
        mask,
        depth,
        depth_lse,
        gate,
        added,
    )


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        is_causal: bool,
        scale: float | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        depth: torch.Tensor,
        depth_lse: torch.Tensor,
        gate: torch.Tensor,
        added: bool,
    ) -> torch.Tensor:
        call = Call(query, key, value, mask, 0.0, is_causal, scale)
        sequence, sequence_lse, extra = kernel.forward(call)
        of_sequence, of_depth = parts_of_both(sequence_lse, depth_lse, gate, added)
        wide = of_sequence.dtype
        output = of_sequence.unsqueeze(-1) * sequence.to(wide) + of_depth.unsqueeze(-1) * depth.to(wide)
        # If `to` has nothing to convert, torch.compile of torch 2.11 loses the gradient of its result.
        output = output if output.dtype == query.dtype else output.to(query.dtype)
        tensors = [part for part in extra if isinstance(part, torch.Tensor)]
        ctx.save_for_backward(query, key, value, mask, depth, depth_lse, sequence, sequence_lse, gate, *tensors)
        ctx.kernel, ctx.is_causal, ctx.scale, ctx.added = kernel, is_causal, scale, added
        ctx.extra = [None if isinstance(part, torch.Tensor) else part for part in extra]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_output,) = gradients
        query, key, value, mask, depth, depth_lse, sequence, sequence_lse, gate, *tensors = ctx.saved_tensors
        kept = iter(tensors)
        extra = [next(kept) if part is None else part for part in ctx.extra]
        call = Call(query, key, value, mask, 0.0, ctx.is_causal, ctx.scale)
        share, rest = shares_of_both(sequence_lse, depth_lse)
        of_sequence, of_depth = parts_of_both(sequence_lse, depth_lse, gate, ctx.added)
        wide = share.dtype
        in_softmax = gate.to(wide) * share
        read, of_output_wide = depth.to(wide), of_output.to(wide)
        apart = read - sequence.to(wide)
        along = (of_output_wide * apart).sum(-1)  # [B, H, T], the gradient of c w
        # With p the weight of a key in the softmax over the sequence and g the gradient of the output, the gradient of a score is
        # p * (of_sequence * (<g, value> - <g, sequence>) - c w (1 - w) along): the last term is what the score takes from the depth.
        # The kernel computes this from a moved output, and from a divisor with which its weights are p * of_sequence.
        moved = (in_softmax * rest / of_sequence).unsqueeze(-1)
        moved_output = (sequence.to(wide) + moved * apart).to(sequence.dtype)
        of_query, of_key, of_value = ctx.kernel.backward(
            call, of_output, moved_output, sequence_lse - of_sequence.log(), *extra
        )
        into_depth = (of_depth.unsqueeze(-1) * of_output_wide).to(depth.dtype)
        into_lse = along * in_softmax * rest
        into_gate = along * share - (of_output_wide * read).sum(-1) if ctx.added else along * share
        return None, None, None, of_query, of_key, of_value, None, into_depth, into_lse, into_gate, None
