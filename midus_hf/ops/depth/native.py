"""The compiled body of attention to the depth, for float32 and bfloat16 on a CPU.

Shapes are as in `depth_attention`. One thread computes each number, from the number's token only: neither the number of
threads nor the other tokens of a call change a bit.
"""

from array import array
from collections.abc import Sequence

import torch

from midus_hf.ops.depth.inputs import DepthInputs, DepthReading, Wanted, new_by_token
from midus_hf.ops.dispatch.native.calls import DEPTH_CALL, address, refuse_places, run, threads_for, with_rows


def native_reading(inputs: DepthInputs) -> DepthReading:
    """Compute `depth_attention` in C. All tensors have one dtype, float32 or bfloat16.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    output = new_by_token(inputs.query)
    lse = output.new_empty(output.transpose(1, 2).shape[:3], dtype=torch.float32)
    _run("midus_depth", inputs, DepthReading(output, lse))
    return DepthReading(output, lse.transpose(1, 2))


def native_gradients(
    inputs: DepthInputs, reading: DepthReading, gradient: DepthReading, wanted: Wanted
) -> list[torch.Tensor]:
    """Return the gradients of query, keys and values, in a list.

    If the query's gradient is not wanted, an empty tensor stands for it; unwanted gradients of slots are left out.

    Args:
        inputs: Arguments of the forward pass.
        reading: Result of the forward pass.
        gradient: Gradient of the loss with respect to that result.
        wanted: Choice of the gradients to compute.
    """
    query = inputs.query
    into_query = new_by_token(query) if wanted.query else None
    into_slots = [new_by_token(slot) for slot in (*inputs.keys, *inputs.values)] if wanted.slots else []
    output, lse, of_lse = (
        part.transpose(1, 2).contiguous() for part in (reading.output, reading.lse.float(), gradient.lse.float())
    )
    of_output = with_rows(gradient.output.to(query.dtype))
    _run(
        "midus_depth_gradients",
        inputs,
        DepthReading(output, lse),
        DepthReading(of_output, of_lse),
        (into_query, into_slots),
    )
    return [query.new_empty(0) if into_query is None else into_query, *into_slots]


def _run(
    name: str,
    inputs: DepthInputs,
    reading: DepthReading,
    gradient: DepthReading | None = None,
    into: tuple[torch.Tensor | None, Sequence[torch.Tensor]] = (None, ()),
) -> None:
    query, keys, values, scaling, softcap = inputs
    into_query, into_slots = into
    if not all(part.is_cpu for part in (query, *keys, *values)):
        slots = {
            f"{part} {slot}": tensor
            for part, of in (("key", keys), ("value", values))
            for slot, tensor in enumerate(of)
        }
        refuse_places({"query": query, **slots})
    query, keys, values = with_rows(query), [with_rows(key) for key in keys], [with_rows(value) for value in values]
    per_slot: Sequence[torch.Tensor | None] = into_slots or [None] * 2 * len(keys)
    table = array("q")
    for key, value, into_key, into_value in zip(
        keys, values, per_slot[: len(keys)], per_slot[len(keys) :], strict=True
    ):
        table.extend((*_heads(key), *_heads(value), address(into_key), address(into_value)))
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    call = DEPTH_CALL.pack(
        *_heads(query),
        *((0, 0, 0, 0) if gradient is None else _heads(gradient.output)),
        table.buffer_info()[0],
        *(address(part) for part in (*reading, None if gradient is None else gradient.lse, into_query)),
        *(texts, heads, kv_heads, tokens, width, len(keys)),
        query.dtype == torch.bfloat16,
        threads_for(texts * tokens * heads),
        scaling,
        softcap or 0.0,
    )
    run(name, call)


def _heads(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the fields of C's `struct heads` for a tensor `[B, H, T, d]` with contiguous rows: address and three strides."""
    return address(tensor), *tensor.stride()[:3]
