"""Attention to the sequence by the kernels of torch, joined with attention to the depth, with the gradient of both at once."""

from typing import Any

import torch

from midus_hf.ops.depth_attention import share_of_depth
from midus_hf.ops.sequence_kernels import Call, Kernel


def joined(
    kernel: Kernel,
    call: Call,
    depth: torch.Tensor,
    depth_lse: torch.Tensor,
    depth_weight: torch.Tensor,
    mixing: torch.Tensor,
) -> torch.Tensor:
    """What heads read in one softmax over sequence and depth: `joint_attention` of what a kernel reads of the sequence.

    The kernel's own gradient is told another output and another divisor than its own, with which it is the gradient of its part:
    where a is 1 those of the softmax over both.

    Args:
        kernel: That torch would run.
        call: Of attention to the sequence.
        depth: `[B, H, T, d]`, what heads read of the depth.
        depth_lse: `[B, H, T]`, its logarithm of the sum of exponentials.
        depth_weight: `[B, H, T]`, g.
        mixing: `[B, H, T]`, a.

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
        depth_weight,
        mixing,
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
        depth_weight: torch.Tensor,
        mixing: torch.Tensor,
    ) -> torch.Tensor:
        call = Call(query, key, value, mask, 0.0, is_causal, scale)
        sequence, sequence_lse, extra = kernel.forward(call)
        ratio, share = share_of_depth(sequence_lse, depth_lse, depth_weight)
        wide, share = share.dtype, share * mixing.to(share.dtype)
        output = sequence.to(wide) + share.unsqueeze(-1) * (depth.to(wide) - sequence.to(wide))
        # Where `to` does nothing, torch.compile of torch 2.11 loses the gradient of what it returns.
        output = output if output.dtype == query.dtype else output.to(query.dtype)
        tensors = [part for part in extra if isinstance(part, torch.Tensor)]
        ctx.save_for_backward(
            query, key, value, mask, depth, depth_lse, sequence, sequence_lse, ratio, mixing, *tensors
        )
        ctx.kernel, ctx.is_causal, ctx.scale = kernel, is_causal, scale
        ctx.extra = [None if isinstance(part, torch.Tensor) else part for part in extra]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_output,) = gradients
        query, key, value, mask, depth, depth_lse, sequence, sequence_lse, ratio, mixing, *tensors = ctx.saved_tensors
        kept = iter(tensors)
        extra = [next(kept) if part is None else part for part in ctx.extra]
        call = Call(query, key, value, mask, 0.0, ctx.is_causal, ctx.scale)
        # w and 1 - w; what is left of the sequence's weights is 1 - a w.
        share, rest, a = ratio / (1 + ratio), 1 / (1 + ratio), mixing.to(ratio.dtype)
        left = 1 - a + a * rest
        apart = depth.to(ratio.dtype) - sequence.to(ratio.dtype)
        wide = of_output.to(ratio.dtype)
        along = (wide * apart).sum(-1)  # [B, H, T], the gradient of a w
        # The gradient of a score is its weight times: what its value adds, less the mean of that, and less what the score takes
        # from the depth, a w (1 - w) along. The kernel computes that if its output is moved, and its divisor is of what is left.
        moved = (a * share * rest / left).unsqueeze(-1)
        told = (sequence.to(ratio.dtype) + moved * apart).to(sequence.dtype)
        of_query, of_key, of_value = ctx.kernel.backward(call, of_output, told, sequence_lse - left.log(), *extra)
        of_depth = ((a * share).unsqueeze(-1) * wide).to(depth.dtype)
        of_lse = along * a * share * rest
        of_weight = along * a * rest * (depth_lse - sequence_lse - torch.log1p(ratio)).exp()
        return None, None, None, of_query, of_key, of_value, None, of_depth, of_lse, of_weight, along * share
