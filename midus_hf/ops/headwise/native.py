"""The compiled body of head-wise lookup, for float32 and bfloat16 on a CPU.

Shapes are as in `headwise_lookup`. One thread writes each result, in the order of tokens: neither the number of threads
nor the other tokens of a call change a bit.
"""

import torch

from midus_hf.ops.dispatch.choices import NATIVE_DTYPES
from midus_hf.ops.dispatch.native.calls import LOOKUP_CALL, refuse_places, run, threads_for, with_rows
from midus_hf.ops.headwise.inputs import LookupInputs, room_for_gradient


def native_lookup(
    inputs: LookupInputs, transform: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient slots and weights `[S, H, k]`, with the arguments of `native_output`."""
    kept = room_for_gradient(inputs)
    return native_output(inputs, transform, kept), *kept


def native_output(
    inputs: LookupInputs,
    transform: torch.Tensor | None = None,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the output only, `[S, H, v]`.

    Args:
        inputs: Arguments of the lookup, with tensors on the CPU.
        transform: Matrix per head, `[H, v, v]`, that multiplies the gathered sum in float32, before rounding. Default:
            None, no transform.
        kept: Slots and weights `[S, H, k]` to fill for a gradient. Default: None.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    query, row_keys, column_keys, bank, residual, k, temperature = inputs
    if residual is not None and residual.dtype not in NATIVE_DTYPES:
        output = native_output(inputs._replace(residual=None), transform, kept)
        return (residual + output).to(residual.dtype)
    if not (
        query.is_cpu
        and row_keys.is_cpu
        and column_keys.is_cpu
        and bank.is_cpu
        and (transform is None or transform.is_cpu)
        and (residual is None or residual.is_cpu)
    ):
        names = ("query", "row_keys", "column_keys", "value_bank", "value_transform", "residual")
        tensors = (query, row_keys, column_keys, bank, transform, residual)
        refuse_places(dict(zip(names, tensors, strict=True)))
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    query, residual = with_rows(query), None if residual is None else with_rows(residual)
    row_keys, column_keys, bank = row_keys.contiguous(), column_keys.contiguous(), bank.contiguous()
    transform = None if transform is None else transform.contiguous()
    if residual is None:
        output = bank.new_empty((tokens, heads, width))
    else:
        output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    slots, weights = (None, None) if kept is None else kept
    call = LOOKUP_CALL.pack(
        query.data_ptr(),
        row_keys.data_ptr(),
        column_keys.data_ptr(),
        bank.data_ptr(),
        0 if transform is None else transform.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        output.data_ptr(),
        0 if slots is None else slots.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        tokens,
        heads,
        n,
        half,
        width,
        k,
        *query.stride()[:2],
        *((0, 0) if residual is None else residual.stride()[:2]),
        n * n * width if bank.dim() == 3 else 0,
        query.dtype == torch.bfloat16,
        residual is not None and residual.dtype == torch.bfloat16,
        0 if slots is None else slots.itemsize,
        False,
        threads_for(tokens * heads),
        temperature,
    )
    run("midus_lookup", call)
    return output
