"""The three sums of `gather/op.py` in compiled C, for float32 and bfloat16 on a CPU.

One thread writes each result, in the order of entries: the number of threads changes no bit.
"""

import torch
from torch import Tensor

from midus_hf.ops.dispatch.library import GATHERS_CALL, ROW_SUMS_CALL, gradient_rows, refuse_places, run


def native_weighted_rows(bank: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return `sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
    _check_places(bank, slots, weights)
    output = bank.new_empty(len(slots), bank.shape[1])
    _gather("midus_weighted_rows", bank, slots, weights.float().contiguous(), output)
    return output


def native_gathered_products(vectors: Tensor, bank: Tensor, slots: Tensor) -> Tensor:
    """Return `<vectors[s], bank[slots[s, m]]>`: `[S, m]`, float32."""
    _check_places(bank, slots, vectors)
    products = slots.new_empty(slots.shape, dtype=torch.float32)
    _gather("midus_gathered_products", bank, slots, gradient_rows(vectors), products)
    return products


def native_row_sums(gradient: Tensor, slots: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Return the sum of `weights[s, m] * gradient[s]` over slots of each row: `[num_rows, v]`, float32."""
    _check_places(gradient, slots, weights)
    arguments = (gradient.unsqueeze(1), _integers(slots).unsqueeze(1), weights.float().unsqueeze(1))
    return native_bank_gradient(*arguments, torch.Size((num_rows, gradient.shape[1])))


def native_bank_gradient(gradient: Tensor, slots: Tensor, weights: Tensor, bank_shape: torch.Size) -> Tensor:
    """Return the gradient of a bank, `[N, v]` (shared by heads) or `[H, N, v]`, float32, summed in order.

    Args:
        gradient: Gradient of the gathered sums, `[S, H, v]`.
        slots: `[S, H, k]`, integers of 2, 4 or 8 bytes.
        weights: `[S, H, k]`, float32.
        bank_shape: The bank's shape.
    """
    tokens, heads, k = slots.shape
    rows, width = bank_shape[-2:]
    gradient, slots, weights = gradient_rows(gradient), slots.contiguous(), weights.contiguous()
    into = weights.new_empty(bank_shape)
    run(
        "midus_row_sums",
        ROW_SUMS_CALL,
        slots.numel(),
        *(tensor.data_ptr() for tensor in (gradient, slots, weights, into)),
        *(tokens, heads, rows, width, k),
        *(*gradient.stride()[:2], rows * width if len(bank_shape) == 3 else 0),
        *(gradient.dtype == torch.bfloat16, slots.itemsize),
    )
    return into


def _gather(name: str, bank: Tensor, slots: Tensor, factors: Tensor, into: Tensor) -> None:
    bank, slots = bank.contiguous(), _integers(slots).contiguous()
    run(
        name,
        GATHERS_CALL,
        slots.numel(),
        *(tensor.data_ptr() for tensor in (bank, slots, factors, into)),
        *(len(slots), *bank.shape, slots.shape[1], factors.stride(0)),
        *(bank.dtype == torch.bfloat16, factors.dtype == torch.bfloat16, slots.itemsize),
    )


def _integers(slots: Tensor) -> Tensor:
    return slots if slots.dtype in (torch.int16, torch.int32) else slots.long()


def _check_places(bank: Tensor, slots: Tensor, factors: Tensor) -> None:
    if not (bank.is_cpu and slots.is_cpu and factors.is_cpu):
        refuse_places({"bank": bank, "slots": slots, "weights": factors})
