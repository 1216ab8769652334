"""The head-wise memory of MIDUS: product-key retrieval per head, values expanded from a shared bank.

Selection, weighting, gathering and transforms are one registered op. Its shapes: query `[S, H, d]`, keys `[H, n, d / 2]`, bank `[N,
v]` or `[H, N, v]`, transforms `[H, v, v]` of a bank `[N, v]`, residual and output `[S, H, v]`.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import (
    RESOLVED,
    differentiable_op,
    narrowest_integer,
    resolve,
    wide_dtype,
    without_autocast,
)
from midus_hf.ops.dispatch.library import native_library
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.gather.native import native_bank_gradient
from midus_hf.ops.gather.op import row_products, row_sums, weighted_rows
from midus_hf.ops.gather.triton import triton_bank_gradient
from midus_hf.ops.midus_hml.triton import triton_lookup
from midus_hf.ops.product_key.native import LookupInputs, native_lookup, native_refusal, native_score_gradients
from midus_hf.ops.product_key.op import (
    check_product_keys,
    halves,
    query_and_key_gradients,
    reference_product_key_topk,
    select,
)
from midus_hf.ops.product_key.triton import triton_score_gradients

# Largest number of elements of an expanded bank, which is made for one forward pass: 512 MB in bfloat16.
MAX_EXPANDED = 1 << 28

_FEW_SCORES = 4096
# Tokens per slot from which on each implementation expands the bank. For fewer, C transforms gathered values in the cache.
_TOKENS_PER_SLOT_EXPANDED = {"native": 3, "torch": 1, "triton": 1}


def reference_headwise_memory(
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    value_bank: Tensor,
    value_transform: Tensor | None,
    k: int,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Retrieve for every head: `M_h = W_h sum_m alpha_m V[slot_m]` (MIDUS, equations 11 to 17).

    Shapes: query `[..., H, d]`, sub-keys `[H, n, d / 2]`, values `[n * n, v]` or, per head, `[H, n * n, v]`, transforms `[H, v, v]`,
    residual and result `[..., H, v]`. Tables are cast to the query's dtype. A residual is added, in its dtype.
    """
    with without_autocast(query.device.type):
        scores, slots = reference_product_key_topk(query, row_keys, column_keys, k)  # [..., H, k]
        value_bank = value_bank.to(query.dtype)
        weights = scores.softmax(dim=-1).to(value_bank.dtype)  # [..., H, k]
        # Thousands of tokens may read one slot: this copy sums the gradient of a half-precision bank in float32.
        learns = torch.is_grad_enabled() and value_bank.requires_grad
        summing_bank = value_bank.to(torch.promote_types(value_bank.dtype, torch.float32)) if learns else value_bank
        if value_bank.dim() == 3:
            first_slots = row_keys.shape[1] ** 2 * torch.arange(len(value_bank), device=slots.device).unsqueeze(-1)
            slots = slots + first_slots  # + [H, 1]: slots in the bank of all heads
            summing_bank = summing_bank.flatten(0, 1)  # [H * N, v]
        retrieved = torch.nn.functional.embedding(slots, summing_bank).to(value_bank.dtype)  # [..., H, k, v]
        output = torch.einsum("...hk,...hkv->...hv", weights, retrieved)  # [..., H, v]
        if value_transform is not None:
            output = torch.einsum("...hv,hwv->...hw", output, value_transform.to(query.dtype))  # [..., H, v]
        return output if residual is None else (residual + output).to(residual.dtype)


def headwise_memory(
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    value_bank: Tensor,
    value_transform: Tensor | None,
    k: int,
    *,
    residual: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Retrieve from the memory of every head (MIDUS, equations 11 to 17).

    Head `h` retrieves its `k` best of `N = n * n` slots, sums their rows of the shared bank, weighted by the softmax of their scores,
    and multiplies the sum with its transform: `M_h = W_h sum_m alpha_m V[slot_m]` (HIVE, equation 16). Rows are transformed first,
    `E_h = V W_h^T`, and gathered afterwards, if it is less work, for N tokens or more (in C for 3 N or more), and all E_h together
    have at most 2^28 elements.

    Tables are cast to the dtype of the query, also under `torch.autocast`: with float32 master weights and a bfloat16 query, the
    result is that of a bfloat16 model. Sums are accumulated in float32 at least.

    Args:
        query: Attention output of each head, `[..., H, d]`, floating point.
        row_keys: Sub-keys K^row, `[H, n, d / 2]`.
        column_keys: Sub-keys K^col, `[H, n, d / 2]`.
        value_bank: Shared base values, `[n * n, v]`, with v = D / H in MIDUS; or a bank per head, `[H, n * n, v]`.
        value_transform: Transforms W_h of column vectors, `[H, v, v]`; None uses values without transform.
        k: Slots retrieved per head, `1 <= k <= n`.
        residual: Summand of the output, `[..., H, v]`, in any floating dtype, which is then the dtype of the output. Default: None.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., H, v]`, the dtype of `query`, or of `residual` if there is one.

    Raises:
        ValueError: If the shapes disagree, or `k` lies outside `1..n`.
    """
    tables, heads = (row_keys, column_keys, value_bank), len(row_keys)
    body = _body(query, tables, value_transform, k, backend)
    with without_autocast(query.device.type):
        if body == "reference":
            return reference_headwise_memory(query, *tables, value_transform, k, residual=residual)
        row_keys, column_keys, value_bank = (t if t.dtype == query.dtype else t.to(query.dtype) for t in tables)
        tokens = math.prod(query.shape[:-2])
        if value_transform is not None:
            value_transform = value_transform.to(query.dtype)
            if (
                tokens >= _TOKENS_PER_SLOT_EXPANDED[body] * len(value_bank)
                and heads * value_bank.numel() <= MAX_EXPANDED
            ):
                value_bank, value_transform = expand_values(value_bank, value_transform), None
        shape = (tokens, heads, value_bank.shape[-1])
        added = None if residual is None else residual.reshape(shape)
        flat_query = query.reshape(tokens, heads, query.shape[-1])
        inputs = LookupInputs(flat_query, row_keys, column_keys, value_bank, value_transform, added, k)
        if body != "torch" and can_skip_dispatcher(*inputs[:-1]):
            output, _ = native_lookup(inputs, False) if body == "native" else lookup(inputs, body, keeps=False)
        else:
            output = headwise_lookup_op(*inputs, body)[0]  # [S, H, v]
        return output.reshape(*query.shape[:-1], shape[-1])


def _body(
    query: Tensor, tables: tuple[Tensor, Tensor, Tensor], value_transform: Tensor | None, k: int, backend: str
) -> str:
    """Check a call's shapes and return its backend; like calls are looked up, unless traced."""
    call: tuple[Any, ...] | None = None
    if not torch.compiler.is_compiling():
        transform_shape = value_transform is None or value_transform.shape
        shapes = (query.shape[-2:], *(table.shape for table in tables), transform_shape)
        call = ("headwise_memory", backend, query.device, query.dtype, *shapes, k)
        if call in RESOLVED:
            return RESOLVED[call]
    row_keys, column_keys, value_bank = tables
    check_product_keys(query, row_keys, column_keys, k)
    heads, n, _ = row_keys.shape
    shape = value_bank.shape
    if len(shape) not in (2, 3) or shape[-2] != n * n or (len(shape) == 3 and shape[0] != heads):
        raise ValueError(
            f"value_bank is {tuple(shape)}; expected [n * n, v] or [H, n * n, v] with n * n = {n * n} and H = {heads}."
        )
    expected = (heads, shape[-1], shape[-1])
    if value_transform is not None and len(shape) == 3:
        raise ValueError("value_transform is given with a bank per head; expected None, or a bank that heads share.")
    if value_transform is not None and value_transform.shape != expected:
        raise ValueError(f"value_transform is {tuple(value_transform.shape)}; expected (H, v, v) = {expected}.")
    body = resolve(backend, query, native_refusal=native_refusal(n, k))
    # The environment decides whether kernels run on a CPU.
    if call is not None and (body in ("torch", "native") or query.is_cuda):
        RESOLVED[call] = body
    return body


def expand_values(value_bank: Tensor, value_transform: Tensor) -> Tensor:
    """Return the bank `[N, v]` transformed per head, `[H, N, v]`: `E_h = V W_h^T` (MIDUS, equation 24)."""
    with without_autocast(value_bank.device.type):
        return torch.bmm(value_bank.expand(len(value_transform), -1, -1), value_transform.transpose(1, 2).contiguous())


# What a lookup keeps for the gradient: slots and their weights, best first, `[S, H, k]` each.
Kept = tuple[Tensor, Tensor]


def lookup(inputs: LookupInputs, backend: str, keeps: bool) -> tuple[Tensor, Kept | None]:
    """Return the output `[S, H, v]`, and the tensors for a gradient if `keeps` is true.

    C transforms gathered values of a block of tokens in the cache; no tensor has the size of all heads' slots.
    """
    if backend == "native" and native_library() is not None:
        return native_lookup(inputs, keeps)
    if inputs.transform is None:
        return triton_lookup(inputs, keeps) if backend == "triton" else torch_lookup(inputs)
    gathered, kept = lookup(inputs._replace(transform=None, residual=None), backend, keeps)
    output, residual = transformed(gathered, inputs.transform), inputs.residual
    return output if residual is None else (residual + output).to(residual.dtype), kept


def torch_lookup(inputs: LookupInputs) -> tuple[Tensor, Kept]:
    """Compute a `lookup` without transforms by PyTorch's operations."""
    query, row_keys, column_keys, bank, _, residual, k = inputs
    tokens, heads, _ = query.shape
    n = row_keys.shape[1]
    wide = wide_dtype(query)
    with without_autocast(query.device.type):
        row_scores, column_scores = (
            torch.bmm(queries, keys.to(wide).transpose(1, 2))  # [H, S, n]
            for queries, keys in zip(halves(query, wide), (row_keys, column_keys), strict=True)
        )
    rows, columns = select(row_scores, column_scores, k)  # [H, S, k]
    scores = row_scores.gather(-1, rows) + column_scores.gather(-1, columns)
    weights = _weights(scores)  # [H, S, k]
    slots = rows * n + columns
    output = weighted_rows(*_flat(bank, slots), weights.flatten(0, 1), "torch")
    output = output.view(heads, tokens, bank.shape[-1]).transpose(0, 1)
    output = (output if residual is None else (residual + output).to(residual.dtype)).contiguous()
    kept = (slots.transpose(0, 1).to(narrowest_integer(n * n)), weights.transpose(0, 1))
    return output, (kept[0].contiguous(), kept[1].contiguous())


def transformed(gathered: Tensor, transform: Tensor) -> Tensor:
    """Apply `W_h` to the gathered sum of each head h, `[S, H, v]`."""
    return torch.matmul(gathered.transpose(0, 1), transform.transpose(1, 2)).transpose(0, 1).contiguous()


def _keeping_lookup(
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    bank: Tensor,
    transform: Optional[Tensor],  # noqa: UP045 - torch.library reads only this form
    residual: Optional[Tensor],  # noqa: UP045
    k: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    output, kept = lookup(
        LookupInputs(query, row_keys, column_keys, bank, transform, residual, k), backend, keeps=True
    )
    assert kept is not None
    return output, *kept


def _lookup_shapes(query, row_keys, column_keys, bank, transform, residual, k, backend):  # type: ignore[no-untyped-def]
    tokens, heads, _ = query.shape
    return (
        (bank if residual is None else residual).new_empty(tokens, heads, bank.shape[-1]),
        query.new_empty(tokens, heads, k, dtype=narrowest_integer(row_keys.shape[1] ** 2)),
        query.new_empty(tokens, heads, k, dtype=wide_dtype(query)),
    )


def _lookup_gradients(
    gradient: Tensor,
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    bank: Tensor,
    transform: Optional[Tensor],  # noqa: UP045
    slots: Tensor,
    weights: Tensor,
    wants: list[bool],
    backend: str,
) -> tuple[Tensor | None, ...]:
    """Return gradients of query, row keys, column keys, bank and transform; None for unwanted ones."""
    in_c = backend == "native" and native_library() is not None
    tensors, kept = (query, row_keys, column_keys, slots), (bank, weights)
    into_bank = into_transform = None
    into_scored: Sequence[Tensor | None] = (None, None, None)
    if transform is not None and in_c:
        *into_scored, into_transform, gradient = native_score_gradients(gradient, *tensors, kept, transform)
    else:
        if transform is not None:
            gathered = weighted_rows(bank, slots.flatten(0, 1).long(), weights.flatten(0, 1), backend)
            gradient = gradient.to(transform.dtype)
            into_transform = torch.bmm(gradient.permute(1, 2, 0), gathered.view(gradient.shape).transpose(0, 1))
            gradient = transformed(gradient, transform.transpose(1, 2))
        if any(wants[:3]) and in_c:
            into_scored = native_score_gradients(gradient, *tensors, kept)
        elif any(wants[:3]) and backend == "triton":
            into_scored = triton_score_gradients(gradient, *tensors, kept)
        elif any(wants[:3]):
            into_scored = _scored_gradients(gradient, *tensors, kept)
    if wants[3] and in_c:
        into_bank = native_bank_gradient(gradient, slots, weights, bank.shape).to(bank.dtype)
    elif wants[3] and backend == "triton":
        into_bank = triton_bank_gradient(gradient, slots, weights, bank.shape, bank.dtype)
    elif wants[3]:
        flat_bank, flat_slots = _flat(bank, slots.transpose(0, 1).long())
        by_head, weights_of_head = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (gradient, weights))
        sums = row_sums(by_head, flat_slots, weights_of_head, len(flat_bank), "torch")
        into_bank = sums.view(bank.shape).to(bank.dtype)
    return *into_scored, into_bank, into_transform


def _scored_gradients(
    gradient: Tensor, query: Tensor, row_keys: Tensor, column_keys: Tensor, slots: Tensor, looked_up: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, row keys and column keys, through the softmax and the chosen scores."""
    bank, weights = looked_up
    slots_of_head, weights_of_head = slots.transpose(0, 1).long(), weights.transpose(0, 1).contiguous()  # [H, S, k]
    by_head = gradient.transpose(0, 1).flatten(0, 1)  # [H * S, v]
    into_weights = row_products(by_head, *_flat(bank, slots_of_head), "torch").view_as(weights_of_head)
    mean = (into_weights * weights_of_head).sum(-1, keepdim=True)
    into_scores = weights_of_head * (into_weights - mean)  # [H, S, k]
    return query_and_key_gradients(into_scores, slots_of_head, query, row_keys, column_keys)


headwise_lookup_op = differentiable_op(
    "headwise_lookup",
    _keeping_lookup,
    _lookup_gradients,
    _lookup_shapes,
    gradients=("query", "row_keys", "column_keys", "bank", "transform"),
    outputs=("output", "slots", "weights"),
    summand="residual",
)


def _weights(scores: Tensor) -> Tensor:
    if scores.numel() <= _FEW_SCORES:
        return scores.softmax(dim=-1)
    shares = (scores - scores[..., :1]).exp_()  # for so few columns, torch's softmax takes five times as long
    return shares.div_(shares.sum(-1, keepdim=True))


def _flat(bank: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return a flat bank `[R, v]`, and slots `[H * S, k]` into it for slots `[H, S, k]` of each head."""
    if bank.dim() == 2:
        return bank, slots.flatten(0, 1)
    heads, slots_of_head, _ = bank.shape
    offsets = slots_of_head * torch.arange(heads, device=slots.device).view(heads, 1, 1)
    return bank.flatten(0, 1), (slots + offsets).flatten(0, 1)
