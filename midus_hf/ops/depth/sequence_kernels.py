"""The kernels of torch for attention to a sequence that return the divisor of their softmax, and which of them runs for a call.

The forward operator of each kernel is the one that `scaled_dot_product_attention` calls. It is called with the same
arguments, so its output is the same bit for bit. The backward operator takes output and divisor as arguments, and
relies on how the forward operator wrote them: on their memory layout, and on the numbers behind the last row. The
functions here lay out other tensors in the same way. Signatures and layouts hold for torch 2.11 to 2.13.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from midus_hf.ops.dispatch import private_torch


class Call(NamedTuple):
    """Arguments of a call of `scaled_dot_product_attention`.

    Args:
        query: `[B, H, T, d]`.
        key: `[B, K, S, d]`.
        value: `[B, K, S, d]`.
        attn_mask: Boolean mask, true for keys that a query reads, or numbers that are added to scores. Default: None,
            every key is read.
        dropout_p: Probability with which attention weights are dropped. Default: 0.
        is_causal: Whether query t reads only keys up to t. Default: false.
        scale: Factor of scores. Default: None, which stands for 1 / sqrt(d).
        enable_gqa: Whether K is less than H. Default: false.
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
        """Factor of scores, a number also if `scale` is None."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


class Kernel(NamedTuple):
    """A kernel of torch that returns the divisor of its softmax.

    Args:
        forward: Function of a call whose mask, if any, is added to scores. It returns the output; the logarithm of the
            sum of exponentials `[B, H, T]`, minus infinity for rows that read nothing; and the further tensors and
            numbers that `backward` needs.
        backward: Function of a call, the gradient of the output, the output and the logarithm of a softmax over the
            call's keys and possibly other keys, and the further results of `forward`. It returns the gradients of
            query, key and value.
        name: torch's name of the kernel, a member of `torch.nn.attention.SDPBackend`.
        excluded: Number that is added to the scores of keys that a boolean mask leaves out. Default: minus infinity.
    """

    forward: Callable[[Call], tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    name: str
    excluded: float = float("-inf")


def kernel_of(call: Call) -> Kernel | None:
    """Return the kernel that torch chooses for a call, if this kernel returns the divisor of its softmax; else None.

    torch would run the same kernel, so an output that nothing is joined to is the same bit for bit. While `torch.compile` traces
    a graph, torch cannot be asked, and static facts decide: on a CPU its only kernel; on a GPU FlashAttention for half
    precision without mask, else the memory-efficient kernel if there are as many key heads as query heads. A graph may
    therefore run another kernel than the same call outside of a graph (torch prefers cuDNN on Hopper); both agree up to
    rounding. The choice of `sdpa_kernel` is ignored while a graph is traced.

    Args:
        call: A call with dropout, or with a mask that requires a gradient, has no kernel here and is left to torch.
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


# CUDA kernels take half-precision heads whose width is a multiple of this number; torch pads other heads into new
# tensors.
_WIDTHS = 8
# Largest width of a head that FlashAttention takes.
_WIDEST = 256


def _static_choice(call: Call) -> str | None:
    """Return the name of a kernel chosen by facts that are known while a graph is traced, or None."""
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
    # cuDNN caches plans by the layout of query, key and value. A cached plan assumes that the other tensors are laid out as in the
    # call for which it was made.
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
    behind = sums[
        :, :, call.query.shape[2] :
    ]  # the kernel reads this padding and relies on the infinity that it wrote there
    of_query, of_key, of_value, _ = private_torch.EFFICIENT_ATTENTION_BACKWARD(
        _laid_out_as(written, of_output),
        call.query,
        call.key,
        call.value,
        bias,
        _laid_out_as(written, output),  # the kernel assumes that the rows of heads are adjacent
        torch.cat([_finite_or_unread(lse), behind], dim=2),
        seed,
        offset,
        0.0,
        [True, True, True, False],
        call.is_causal,
        scale=call.scale,
    )
    return of_query, of_key, of_value


# Offsets of texts of several lengths in queries and keys: None, since all texts have one length.
_ONE_LENGTH = (None, None)


def _lengths(call: Call) -> tuple[int, int]:
    """Return the number of queries and of keys of a text."""
    return call.query.shape[2], call.key.shape[2]


def _aligned_bias(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the mask `[B, H, T, S]` with rows that begin at multiples of 8 elements, as torch passes it to the efficient kernel."""
    if mask.stride(-1) != 1 or any(stride % _WIDTHS for stride in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, _WIDTHS - keys % _WIDTHS))[..., :keys]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])


def _of_rows_that_read(lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logarithms `[B, H, T]` with minus infinity, instead of the 0 of kernels, for rows whose mask leaves out every key."""
    if mask is None:
        return lse
    return lse.masked_fill((mask == float("-inf")).all(-1), float("-inf"))


def _finite_or_unread(lse: torch.Tensor) -> torch.Tensor:
    """Return logarithms with infinity for rows that read nothing: weights `exp(-inf - inf)` make the gradients of these rows 0."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _laid_out_as(written: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the memory layout of `written`, copied if its strides differ."""
    return tensor if tensor.stride() == written.stride() else torch.empty_like(written).copy_(tensor)


# Kernels by device type and torch's name of the kernel.
_KERNELS = {
    ("cpu", "FLASH_ATTENTION"): Kernel(_cpu_forward, _cpu_backward, "FLASH_ATTENTION"),
    ("cuda", "FLASH_ATTENTION"): Kernel(_flash_forward, _flash_backward, "FLASH_ATTENTION"),
    ("cuda", "EFFICIENT_ATTENTION"): Kernel(_efficient_forward, _efficient_backward, "EFFICIENT_ATTENTION"),
    # cuDNN returns NaN for a row that is minus infinity throughout; torch itself adds this number instead.
    ("cuda", "CUDNN_ATTENTION"): Kernel(_cudnn_forward, _cudnn_backward, "CUDNN_ATTENTION", excluded=-65504.0),
}


def _has(device: str, name: str) -> bool:
    """Return whether this torch has both operators of a kernel."""
    name = "CPU_ATTENTION" if device == "cpu" else name
    return None not in (getattr(private_torch, name), getattr(private_torch, f"{name}_BACKWARD"))
