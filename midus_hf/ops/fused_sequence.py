"""Attention to the sequence by the kernels of torch, joined with attention to the depth, with the gradient of both at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from midus_hf.ops.depth_attention import share_of_depth

_FLASH = 1
"""What torch calls FlashAttention among the kernels of `scaled_dot_product_attention`."""
_CUDA_WIDTHS = 8
"""Of whose multiples the kernel of CUDA takes heads; torch pads others, and calls it with something else than it was given."""


class Call(NamedTuple):
    """A call of `scaled_dot_product_attention`, as torch takes it.

    Args:
        query: `[B, H, T, d]`.
        key: `[B, K, S, d]`.
        value: `[B, K, S, d]`.
        attn_mask: True where a query reads, or what is added to scores. Default: every key is read.
        dropout_p: Of attention weights.
        is_causal: Whether query t reads keys up to t alone.
        scale: By what scores are multiplied; None for 1 / sqrt(d).
        enable_gqa: Whether K is less than H.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def scaling(self) -> float:
        """By what scores are multiplied."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


class Kernel(NamedTuple):
    """A kernel of torch that tells by what its softmax divides.

    Args:
        forward: Given a call, the output, the logarithm of the sum of exponentials `[B, H, T]`, and what `backward` needs besides.
        backward: Given a call, the gradient of the output, output and logarithm of a softmax that has the keys of the call among
            others, and what `forward` gave besides: the gradients of query, key and value.
    """

    forward: Callable[[Call], tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def kernel_of(call: Call) -> Kernel | None:
    """The kernel that torch would run for a call, if it tells by what its softmax divides; None if it is another or tells nothing."""
    device = call.query.device.type
    if call.dropout_p or device not in _KERNELS:
        return None
    if torch.compiler.is_compiling():
        chosen = device == "cpu"  # of tensors without data torch says that it would not
    else:
        chosen = torch._fused_sdp_choice(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa) == _FLASH
    if not chosen or (device == "cuda" and (call.attn_mask is not None or call.query.shape[-1] % _CUDA_WIDTHS)):
        return None
    return _KERNELS[device]


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
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, float("-inf"))
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


def _cpu_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.is_causal, attn_mask=call.attn_mask, scale=call.scale
    )
    return output, lse, ()


def _cpu_backward(
    call: Call, of_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of_output,
        call.query,
        call.key,
        call.value,
        output,
        lse,
        0.0,
        call.is_causal,
        attn_mask=call.attn_mask,
        scale=call.scale,
    )


def _cuda_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    output, lse, *extra = torch.ops.aten._scaled_dot_product_flash_attention(
        call.query, call.key, call.value, 0.0, call.is_causal, False, scale=call.scale
    )
    starts_and_lengths, seeds = extra[:4], extra[4:6]
    return output, lse, (*starts_and_lengths, *seeds)


def _cuda_backward(
    call: Call, of_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, *extra: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts_and_lengths, seeds = extra[:4], extra[4:]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        of_output,
        call.query,
        call.key,
        call.value,
        output,
        lse,
        *starts_and_lengths,
        0.0,
        call.is_causal,
        *seeds,
        scale=call.scale,
    )


_KERNELS = {"cpu": Kernel(_cpu_forward, _cpu_backward), "cuda": Kernel(_cuda_forward, _cuda_backward)}
"""By the type of the device. That of the CPU takes masks, that of CUDA none."""
