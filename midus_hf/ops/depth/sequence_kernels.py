"""The kernels of torch for attention to a sequence that tell by what their softmax divides, and which of them runs for a call.

Each is the very operator that `scaled_dot_product_attention` calls, with the arguments that it calls it with, so that what comes out
is the same bit for bit; and its backward operator, which takes output and divisor as arguments. What operators take for granted of
these, because they wrote them (how they lie in memory, what stands behind the last row), is made so here. Signatures and layouts are
those of torch 2.11 to 2.13.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from midus_hf.ops.dispatch import private_torch


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
        forward: Given a call whose mask is added to scores, the output, the logarithm of the sum of exponentials `[B, H, T]`, minus
            infinity where a row reads nothing, and what `backward` needs besides: tensors and numbers.
        backward: Given a call, the gradient of the output, output and logarithm of a softmax that has the keys of the call among
            others, and what `forward` gave besides: the gradients of query, key and value.
        name: What torch calls it among its kernels, as in `torch.nn.attention.SDPBackend`.
        excluded: What is added to scores of keys that a mask of truth values leaves out.
    """

    forward: Callable[[Call], tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    name: str
    excluded: float = float("-inf")


def kernel_of(call: Call) -> Kernel | None:
    """Return the kernel that computes a call and tells by what its softmax divides; None if none does.

    It is the kernel that torch chooses for the call, so that joining nothing to what it reads changes no bit. While `torch.compile`
    traces a graph torch cannot be asked, and static facts decide: on a CPU its one kernel; on a GPU FlashAttention for half precision
    without mask, else the memory-efficient kernel where each query head has a key head of its own. So a graph may have another kernel
    than the same call outside of it (torch prefers cuDNN on Hopper), and both agree up to rounding; and what `sdpa_kernel` allows is
    not heard while a graph is traced.

    Args:
        call: As torch takes it. One with dropout, or with a mask that wants a gradient, is left to torch.
    """
    if call.dropout_p or (call.attn_mask is not None and call.attn_mask.requires_grad):
        return None
    device = call.query.device.type
    if torch.compiler.is_compiling():
        name = _static_choice(call)
    elif device in ("cpu", "cuda"):
        chosen = private_torch.chosen_attention(*call[:4], *call[5:])
        name = None if chosen is None else SDPBackend(chosen).name
    else:
        return None
    if (device, name) == ("cuda", "FLASH_ATTENTION") and call.query.shape[-1] % _WIDTHS:
        return None
    kernel = None if name is None else _KERNELS.get((device, name))
    return kernel if kernel is not None and _has(device, kernel.name) else None


_WIDTHS = 8
"""Of whose multiples kernels of CUDA take heads of half precision; torch pads others, and calls them with other tensors."""
_WIDEST = 256
"""Heads that FlashAttention takes."""


def _static_choice(call: Call) -> str | None:
    """Choose a kernel by what a graph knows of a call before it runs."""
    query, key, value, mask = call[:4]
    if query.device.type == "cpu":
        return "FLASH_ATTENTION"
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    width, is_half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    alike = query.dtype == key.dtype == value.dtype and width == key.shape[-1] == value.shape[-1]
    if not alike or any(heads.stride(-1) != 1 for heads in (query, key, value)):
        return None
    aligned = width % (_WIDTHS if is_half else _WIDTHS // 2) == 0
    square = not call.is_causal or query.shape[2] == key.shape[2]
    if is_half and aligned and mask is None and square and width <= _WIDEST:
        return "FLASH_ATTENTION"
    fits = mask is None or mask.dtype in (torch.bool, query.dtype)
    if aligned and fits and query.dtype != torch.float64 and query.shape[1] == key.shape[1]:
        return "EFFICIENT_ATTENTION"
    return None


def _cpu_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    output, lse = private_torch.CPU_ATTENTION(
        call.query, call.key, call.value, 0.0, call.is_causal, attn_mask=call.attn_mask, scale=call.scale
    )
    return output, _of_rows_that_read(lse, call.attn_mask), ()


def _cpu_backward(
    call: Call, of_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return private_torch.CPU_ATTENTION_BACKWARD(
        of_output,
        call.query,
        call.key,
        call.value,
        output,
        _finite_or_unread(lse),
        0.0,
        call.is_causal,
        attn_mask=call.attn_mask,
        scale=call.scale,
    )


def _flash_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    output, lse, _, _, _, _, seed, offset, _ = private_torch.FLASH_ATTENTION(
        call.query, call.key, call.value, 0.0, call.is_causal, False, scale=call.scale
    )
    return output, lse, (seed, offset)


def _flash_backward(
    call: Call,
    of_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return private_torch.FLASH_ATTENTION_BACKWARD(
        of_output,
        call.query,
        call.key,
        call.value,
        output,
        lse.contiguous(),
        *_ONE_LENGTH,
        *_lengths(call),
        0.0,
        call.is_causal,
        seed,
        offset,
        scale=call.scale,
    )


def _cudnn_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    output, sums, _, _, _, _, seed, offset, _ = private_torch.CUDNN_ATTENTION(
        call.query, call.key, call.value, call.attn_mask, True, 0.0, call.is_causal, False, scale=call.scale
    )
    return output, sums.reshape(output.shape[:3]), (output, sums, seed, offset)  # [B, H, T, 1]


def _cudnn_backward(
    call: Call,
    of_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    written: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Plans of cuDNN are kept by how query, key and value lie, and hold for the layout in which the first such call had the others.
    return private_torch.CUDNN_ATTENTION_BACKWARD(
        _laid_out_as(written, of_output),
        call.query,
        call.key,
        call.value,
        _laid_out_as(written, output),
        _laid_out_as(sums, lse.view(sums.shape)),
        seed,
        offset,
        call.attn_mask,
        *_ONE_LENGTH,
        *_lengths(call),
        0.0,
        call.is_causal,
        scale=call.scale,
    )


def _efficient_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    bias = None if call.attn_mask is None else _aligned_bias(call.attn_mask, call)
    output, sums, seed, offset = private_torch.EFFICIENT_ATTENTION(
        call.query, call.key, call.value, bias, True, 0.0, call.is_causal, scale=call.scale
    )
    lse = _of_rows_that_read(sums[:, :, : call.query.shape[2]], call.attn_mask)  # of [B, H, T rounded up to 32]
    return output, lse, (output, sums, seed, offset, *(() if bias is None else (bias,)))


def _efficient_backward(
    call: Call,
    of_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    written: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    behind = sums[:, :, call.query.shape[2] :]  # the kernel reads them, and counts on the infinity that it wrote there
    of_query, of_key, of_value, _ = private_torch.EFFICIENT_ATTENTION_BACKWARD(
        _laid_out_as(written, of_output),
        call.query,
        call.key,
        call.value,
        bias,
        _laid_out_as(written, output),  # it takes rows of heads for adjacent
        torch.cat([_finite_or_unread(lse), behind], dim=2),
        seed,
        offset,
        0.0,
        [True, True, True, False],
        call.is_causal,
        scale=call.scale,
    )
    return of_query, of_key, of_value


_ONE_LENGTH = (None, None)
"""Where texts of several lengths begin in queries and keys: nowhere, since all have one."""


def _lengths(call: Call) -> tuple[int, int]:
    """Return how many queries and keys a text has."""
    return call.query.shape[2], call.key.shape[2]


def _aligned_bias(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the mask `[B, H, T, S]` with rows that begin at multiples of 8 numbers, as torch hands it to the efficient kernel."""
    if mask.stride(-1) != 1 or any(stride % _WIDTHS for stride in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, _WIDTHS - keys % _WIDTHS))[..., :keys]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])


def _of_rows_that_read(lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logarithms `[B, H, T]` that are minus infinity, not 0 as kernels have it, where a mask leaves out every key of a row."""
    if mask is None:
        return lse
    return lse.masked_fill((mask == float("-inf")).all(-1), float("-inf"))


def _finite_or_unread(lse: torch.Tensor) -> torch.Tensor:
    """Return logarithms with which the gradient of a row that reads nothing is zero: its weights are `exp(-inf - inf)`."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _laid_out_as(written: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it lies in memory where a kernel wrote it."""
    return tensor if tensor.stride() == written.stride() else torch.empty_like(written).copy_(tensor)


_KERNELS = {
    ("cpu", "FLASH_ATTENTION"): Kernel(_cpu_forward, _cpu_backward, "FLASH_ATTENTION"),
    ("cuda", "FLASH_ATTENTION"): Kernel(_flash_forward, _flash_backward, "FLASH_ATTENTION"),
    ("cuda", "EFFICIENT_ATTENTION"): Kernel(_efficient_forward, _efficient_backward, "EFFICIENT_ATTENTION"),
    # torch's own remedy for cuDNN, which makes no number of a row that is minus infinity throughout
    ("cuda", "CUDNN_ATTENTION"): Kernel(_cudnn_forward, _cudnn_backward, "CUDNN_ATTENTION", excluded=-65504.0),
}
"""By the type of the device and torch's name."""


def _has(device: str, name: str) -> bool:
    """Return whether this torch has both operators of a kernel."""
    name = "CPU_ATTENTION" if device == "cpu" else name
    return None not in (getattr(private_torch, name), getattr(private_torch, f"{name}_BACKWARD"))
