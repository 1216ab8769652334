"""The compiled body of attention over the depth, for float32 and bfloat16 on a CPU, as registered ops.

Shapes as in `depth_attention`. Each number is computed by one thread, from its own token alone: neither the number of threads nor the
other tokens of a call change its bits.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Optional

import torch

from midus_hf.ops.depth_batched import batched_gradients, batched_reading
from midus_hf.ops.library import custom_op
from midus_hf.ops.native.calls import DEPTH_CALL, address, refuse_places, run, threads_for, with_rows
from midus_hf.ops.native.library import native_library


def native_reading(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the slots of the depth: see `depth_attention`. All tensors have one dtype, float32 or bfloat16.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    output = _by_token(query)
    lse = output.new_empty(output.transpose(1, 2).shape[:3], dtype=torch.float32)
    _run("midus_depth", query, keys, values, scaling, softcap, output, lse)
    return output, lse.transpose(1, 2)


def native_gradients(
    gradient: torch.Tensor,
    lse_gradient: torch.Tensor,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    softcap: float | None,
    wants_query: bool,
    wants_slots: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of the query, None if it is not wanted, and of keys and values, none if these are not wanted."""
    into_query = _by_token(query) if wants_query else None
    into_slots = [_by_token(slot) for slot in (*keys, *values)] if wants_slots else []
    output, lse, lse_gradient = (
        part.transpose(1, 2).contiguous() for part in (output, lse.float(), lse_gradient.float())
    )
    further = (with_rows(gradient.to(query.dtype)), lse_gradient, into_query, into_slots)
    _run("midus_depth_gradients", query, keys, values, scaling, softcap, output, lse, *further)
    return into_query, into_slots


def _run(
    name: str,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    softcap: float | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor | None = None,
    lse_gradient: torch.Tensor | None = None,
    into_query: torch.Tensor | None = None,
    into_slots: Sequence[torch.Tensor] = (),
) -> None:
    if not all(part.is_cpu for part in (query, *keys, *values)):
        slots = {
            f"{part} {slot}": tensor
            for part, of in (("key", keys), ("value", values))
            for slot, tensor in enumerate(of)
        }
        refuse_places({"query": query, **slots})
    query, keys, values = with_rows(query), [with_rows(key) for key in keys], [with_rows(value) for value in values]
    into: Sequence[torch.Tensor | None] = into_slots or [None] * 2 * len(keys)
    table = array("q")
    for key, value, into_key, into_value in zip(keys, values, into[: len(keys)], into[len(keys) :], strict=True):
        table.extend((*_heads(key), *_heads(value), address(into_key), address(into_value)))
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    call = DEPTH_CALL.pack(
        *_heads(query),
        *((0, 0, 0, 0) if gradient is None else _heads(gradient)),
        table.buffer_info()[0],
        *(address(part) for part in (output, lse, lse_gradient, into_query)),
        *(texts, heads, kv_heads, tokens, width, len(keys)),
        query.dtype == torch.bfloat16,
        threads_for(texts * tokens * heads),
        scaling,
        softcap or 0.0,
    )
    run(name, call)


def _heads(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return what C's `struct heads` says of a tensor `[B, H, T, d]` whose rows lie in one piece."""
    return address(tensor), *tensor.stride()[:3]


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return a new tensor `[B, H, T, d]` that lies in memory token by token, as C writes it."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


@custom_op("native_depth_attention")
def native_depth_op(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    softcap: Optional[float],  # noqa: UP045 - torch.library reads this form alone
) -> tuple[torch.Tensor, torch.Tensor]:
    """`depth_attention` in C; by PyTorch where a graph was traced for C that cannot be built here."""
    if native_library() is None:
        read, lse = batched_reading(query, keys, values, scaling, softcap)
        return _laid_by_token(read), _laid_by_token(lse)
    return native_reading(query, keys, values, scaling, softcap)


@native_depth_op.register_fake
def _(query, keys, values, scaling, softcap):  # type: ignore[no-untyped-def]
    output = _by_token(query)
    return output, output.new_empty(output.transpose(1, 2).shape[:3], dtype=torch.float32).transpose(1, 2)


@custom_op("native_depth_attention_backward")
def native_depth_gradients_op(
    gradient: torch.Tensor,
    lse_gradient: torch.Tensor,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
    wants_query: bool,
    wants_slots: bool,
) -> list[torch.Tensor]:
    """Gradients of the query, keys and values; empty is that of a query which is not wanted, and there are none of such slots."""
    arguments = (gradient, lse_gradient, query, keys, values, output, lse, scaling, softcap)
    if native_library() is None:
        into_query, *into_slots = map(_laid_by_token, batched_gradients(*arguments))
        return [into_query if wants_query else query.new_empty(0), *(into_slots if wants_slots else ())]
    found, into_slots = native_gradients(*arguments, wants_query, wants_slots)
    return [query.new_empty(0) if found is None else found, *into_slots]


@native_depth_gradients_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient, lse_gradient, query, keys, values, output, lse, scaling, softcap, wants_query, wants_slots
):
    into_query = _by_token(query) if wants_query else query.new_empty(0)
    return [into_query, *(_by_token(slot) for slot in (*keys, *values) if wants_slots)]


def _laid_by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return numbers `[B, H, T, ...]` as they lie where C writes them, which a graph counts on."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, keys, values, ctx.scaling, ctx.softcap = inputs
    ctx.count = len(keys)
    ctx.save_for_backward(query, *output, *keys, *values)


def _differentiate(ctx: Any, gradient: torch.Tensor, lse_gradient: torch.Tensor) -> tuple:
    query, output, lse, *slots = ctx.saved_tensors
    keys, values = slots[: ctx.count], slots[ctx.count :]
    wants_query, wants_keys, wants_values, *_ = ctx.needs_input_grad
    wants_slots = any(wants_keys) or any(wants_values)
    into_query, *into_slots = native_depth_gradients_op(
        gradient, lse_gradient, query, keys, values, output, lse, ctx.scaling, ctx.softcap, wants_query, wants_slots
    )
    nothing = [None] * ctx.count
    into_keys, into_values = (into_slots[: ctx.count], into_slots[ctx.count :]) if wants_slots else (nothing, nothing)
    return into_query if wants_query else None, into_keys, into_values, None, None


native_depth_op.register_autograd(_differentiate, setup_context=_save)
