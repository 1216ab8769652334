"""Attention to the sequence and the depth by one kernel, as an op of torch."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from benchmarks.fused_depth.forward import Read, triton_fused_attention
from benchmarks.fused_depth.gradients import triton_fused_gradients
from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.precision import shared_dtype

# Largest width of a head: tiles of wider heads would not fit into shared memory, and neither would tiles of float32.
_MOST_WIDTH = 256
# Most query heads per head of keys and values: a tile of rows holds all of them.
_MOST_GROUP = 64
# Most programs of one launch.
_MOST_PROGRAMS = (1 << 31) - 1


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    is_causal: bool,
    gate: torch.Tensor | None = None,
    added: bool = False,
) -> torch.Tensor:
    """Attend to the sequence and to the slots of the depth in one pass, joined as in `joint_attention`.

    A kernel of this project reads the sequence, not torch's. If c is 0, the result is what this kernel reads of the
    sequence, plus what it reads of the depth if `added`; it differs from torch's result by rounding.

    Args:
        query: `[B, H, T, d]`.
        key: Key of the sequence, `[B, K, T, d]`; K divides H, and query head h reads head h // (H / K).
        value: Value of the sequence, `[B, K, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`; n is 1 or more.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        is_causal: Whether query t reads only keys of the sequence up to t.
        gate: c of `joint_attention` per head, `[H]`. Default: 1.
        added: Whether (1 - c) times what heads read of the depth is added. Default: false.

    Returns:
        `[B, H, T, d]`, in the dtype of the query; under autocast, in the dtype that `shared_dtype` gives. Gradients
        flow to every tensor.

    Raises:
        ValueError: If kernels cannot run, or do not take these tensors.
    """
    refusal = fused_refusal(query, key, value, keys, values)
    if refusal is not None:
        raise ValueError(f"one kernel cannot read sequence and depth: {refusal}.")
    dtype = shared_dtype(query, key, value, *keys, *values)
    resolve("triton", query.to(dtype))
    tensors = (query, key, value, *keys, *values, gate)
    keeps = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    slots = ([slot.to(dtype) for slot in part] for part in (keys, values))
    sequence = (part.to(dtype) for part in (query, key, value))
    output = fused_attention_op(*sequence, *slots, scaling, is_causal, gate, added and gate is not None, keeps)[0]
    return output if torch.is_autocast_enabled(query.device.type) else output.to(query.dtype)


def fused_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> str | None:
    """Return why `fused_attention` refuses these tensors, and what it expects; None if it takes them."""
    texts, heads, tokens, width = query.shape
    if not keys or len(keys) != len(values):
        return f"there are {len(keys)} keys and {len(values)} values of the depth; expected as many, and one or more"
    for heads_read in (key, value, *keys, *values):
        if heads_read.shape != key.shape or (*key.shape[:1], *key.shape[2:]) != (texts, tokens, width):
            return (
                f"query is {tuple(query.shape)} and what it reads {tuple(heads_read.shape)}; expected as many texts and "
                "tokens, and heads of one width"
            )
    if heads % key.shape[1]:
        return f"{heads} query heads read {key.shape[1]}; expected a multiple"
    if heads // key.shape[1] > _MOST_GROUP:
        return f"{heads // key.shape[1]} query heads read each head of keys; expected {_MOST_GROUP} or fewer"
    dtype = shared_dtype(query, key, value, *keys, *values)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"heads are {dtype}; expected bfloat16 or float16"
    if width > _MOST_WIDTH:
        return f"heads are {width} wide; expected {_MOST_WIDTH} or less"
    if texts * tokens * key.shape[1] > _MOST_PROGRAMS:
        return (
            f"there are {texts} texts of {tokens} tokens and {key.shape[1]} heads of keys; expected {_MOST_PROGRAMS} or less "
            "in all"
        )
    return None


@custom_op("fused_attention")
def fused_attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    is_causal: bool,
    gate: Optional[torch.Tensor],  # noqa: UP045 - torch.library reads this form alone
    added: bool,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `fused_attention`, and return the fields of `Read`, which the gradient needs."""
    return triton_fused_attention(query, key, value, keys, values, scaling, is_causal, gate, added, keeps)


@fused_attention_op.register_fake
def _(query, key, value, keys, values, scaling, is_causal, gate, added, keeps):  # type: ignore[no-untyped-def]
    apart = gate is not None
    output = _by_token(query)
    parts = [_by_token(query) if apart and keeps else _nothing(query, 4) for _ in range(2)]
    sums = [
        output.new_empty(output.transpose(1, 2).shape[:3], dtype=torch.float32).transpose(1, 2)
        if there
        else _nothing(query, 3).float()
        for there in (True, apart)
    ]
    return Read(output, *parts, *sums)


@custom_op("fused_attention_backward")
def fused_gradients_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    is_causal: bool,
    gate: Optional[torch.Tensor],  # noqa: UP045
    added: bool,
    read: Sequence[torch.Tensor],
    wants_query: bool,
    wants_sequence: bool,
    wants_slots: bool,
) -> list[torch.Tensor]:
    """Return gradients of query, key, value and gate, empty tensors if not wanted or without a gate, then of keys and of values."""
    made = triton_fused_gradients(
        *(gradient, query, key, value, keys, values, scaling, is_causal, gate, added, Read(*read)),
        *(wants_query, wants_sequence, wants_slots),
    )
    single = (made.query, made.key, made.value, made.gate)
    return [*(query.new_empty(0) if one is None else one for one in single), *made.keys, *made.values]


@fused_gradients_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient, query, key, value, keys, values, scaling, is_causal, gate, added, read,
    wants_query, wants_sequence, wants_slots,
):  # fmt: skip
    wanted = ((query, wants_query), (key, wants_sequence), (value, wants_sequence))
    of_gate = query.new_empty(0) if gate is None else torch.empty_like(gate, dtype=torch.float32)
    return [
        *(_by_token(part) if wants else query.new_empty(0) for part, wants in wanted),
        of_gate,
        *(_by_token(slot) for slot in (*keys, *values) if wants_slots),
    ]


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor `[B, H, T, d]` that is laid out in memory token by token, as kernels write."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


def _nothing(like: torch.Tensor, dims: int) -> torch.Tensor:
    return like.new_empty((0,) * dims).transpose(1, 2)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, keys, values, ctx.scaling, ctx.is_causal, gate, ctx.added, _ = inputs
    ctx.count = len(keys)
    ctx.save_for_backward(query, key, value, gate, *output, *keys, *values)


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    query, key, value, gate, *rest = ctx.saved_tensors
    read, slots = rest[: len(Read._fields)], rest[len(Read._fields) :]
    keys, values = slots[: ctx.count], slots[ctx.count :]
    wants_query, wants_key, wants_value, wants_keys, wants_values, _, _, wants_gate, *_ = ctx.needs_input_grad
    wants_sequence, wants_slots = wants_key or wants_value, any(wants_keys) or any(wants_values)
    into_query, into_key, into_value, into_gate, *into_slots = fused_gradients_op(
        *(gradient, query, key, value, keys, values, ctx.scaling, ctx.is_causal, gate, ctx.added, read),
        *(wants_query, wants_sequence, wants_slots),
    )
    return (
        into_query if wants_query else None,
        into_key if wants_sequence else None,
        into_value if wants_sequence else None,
        into_slots[: ctx.count] if wants_slots else [None] * ctx.count,
        into_slots[ctx.count :] if wants_slots else [None] * ctx.count,
        None,
        None,
        into_gate.to(gate.dtype) if wants_gate else None,
        None,
        None,
    )


fused_attention_op.register_autograd(_differentiate, setup_context=_save)
