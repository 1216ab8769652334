"""The kernels of torch for attention to a sequence that tell by what their softmax divides, and which of them runs for a call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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
