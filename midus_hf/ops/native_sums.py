"""The compiled bodies of the three sums behind gathering, for float32 and bfloat16 on a CPU; as in `row_sums`.

Each result is written by one thread alone, in the order of entries: the number of threads changes no bit.
"""

import torch

from midus_hf.ops.native_calls import GATHERS_CALL, ROW_SUMS_CALL
from midus_hf.ops.native_run import gradient_rows, refuse_places, run, threads_for


def native_weighted_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
    _check_places(bank, slots, weights)
    output = bank.new_empty(len(slots), bank.shape[1])
    _gather("midus_weighted_rows", bank, slots, weights.float().contiguous(), output)
    return output


def native_gathered_products(vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`<vectors[s], bank[slots[s, m]]>`: `[S, m]`, float32."""
    _check_places(bank, slots, vectors)
    products = slots.new_empty(slots.shape, dtype=torch.float32)
    _gather("midus_gathered_products", bank, slots, gradient_rows(vectors), products)
    return products


def native_row_sums(gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`sum over (s, m) with slots[s, m] == r of weights[s, m] * gradient[s]`: `[num_rows, v]`, float32."""
    _check_places(gradient, slots, weights)
    gradient, slots, weights = gradient_rows(gradient), _integers(slots), weights.float().contiguous()
    sums = weights.new_empty(num_rows, gradient.shape[1])
    call = ROW_SUMS_CALL.pack(
        gradient.data_ptr(),
        slots.data_ptr(),
        weights.data_ptr(),
        sums.data_ptr(),
        len(slots),
        1,
        num_rows,
        gradient.shape[1],
        slots.shape[1],
        gradient.stride(0),
        0,
        0,
        gradient.dtype == torch.bfloat16,
        slots.itemsize,
        threads_for(slots.numel()),
    )
    run("midus_row_sums", call)
    return sums


def _gather(name: str, bank: torch.Tensor, slots: torch.Tensor, given: torch.Tensor, into: torch.Tensor) -> None:
    bank, slots = bank.contiguous(), _integers(slots)
    call = GATHERS_CALL.pack(
        bank.data_ptr(),
        slots.data_ptr(),
        given.data_ptr(),
        into.data_ptr(),
        len(slots),
        *bank.shape,
        slots.shape[1],
        given.stride(0),
        bank.dtype == torch.bfloat16,
        given.dtype == torch.bfloat16,
        slots.itemsize,
        threads_for(slots.numel()),
    )
    run(name, call)


def _integers(slots: torch.Tensor) -> torch.Tensor:
    """Slots as C reads them: of 2, 4 or 8 bytes."""
    return (slots if slots.dtype in (torch.int16, torch.int32) else slots.long()).contiguous()


def _check_places(bank: torch.Tensor, slots: torch.Tensor, given: torch.Tensor) -> None:
    if not (bank.is_cpu and slots.is_cpu and given.is_cpu):
        refuse_places({"bank": bank, "slots": slots, "weights": given})
