"""The head-wise memory of MIDUS: product-key retrieval per head, and values expanded per head from one shared bank."""

import math
from typing import Any

import torch

from midus_hf.ops.dispatch.choices import RESOLVED, resolve
from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.midus_hml.lookup import headwise_lookup_op, lookup
from midus_hf.ops.midus_hml.native import LookupInputs, native_lookup
from midus_hf.ops.midus_hml.reference import headwise_memory as reference
from midus_hf.ops.product_key.native import native_refusal
from midus_hf.ops.product_key.op import check_product_keys

# Largest number of elements of an expanded bank, which is made for one forward pass: 512 MB in bfloat16.
MOST_EXPANDED = 1 << 28

# Tokens per slot from which on each implementation expands the bank. For fewer, C transforms gathered values in the cache,
# which is less work.
_TIMES_EXPANDED = {"native": 3, "torch": 1, "triton": 1}


def headwise_memory(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor | None,
    k: int,
    *,
    residual: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Retrieve from the memory of every head (MIDUS, equations 11 to 17).

    Head `h` retrieves its `k` best of `N = n * n` slots and sums their rows of the shared bank, weighted by the softmax
    of their scores. Then it multiplies the sum with its transform: `M_h = W_h sum_m alpha_m V[slot_m]` (HIVE, equation
    16). The outputs of heads are concatenated, as in attention.

    Because the transform is linear, rows can be transformed first, `E_h = V W_h^T`, and gathered afterwards. This is
    done if it is less work, for N tokens or more (in C for 3 N or more), and all E_h together have at most 2^28
    elements. The gradients are then `dV = sum_h G_h W_h` and `dW_h = G_h^T V`, from the sums `G_h` of gradients per
    slot.

    Tables are cast to the dtype of the query, also under `torch.autocast`: with float32 master weights and a bfloat16
    query, the result is that of a bfloat16 model. Sums are accumulated in float32 at least.

    Args:
        query: Attention output of each head, `[..., H, d]`, floating point.
        row_keys: Sub-keys K^row, `[H, n, d / 2]`.
        column_keys: Sub-keys K^col, `[H, n, d / 2]`.
        value_bank: Shared base values, `[n * n, v]`, with v = D / H in MIDUS; or a bank per head, `[H, n * n, v]`.
        value_transform: Transforms W_h, `[H, v, v]`; each maps a column vector, as in the paper. None uses values
            without transform.
        k: Slots retrieved per head, `1 <= k <= n`.
        residual: Summand of the output, `[..., H, v]`, in any floating dtype, which is then the dtype of the output.
            Default: None.
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
            return reference(query, *tables, value_transform, k, residual=residual)
        row_keys, column_keys, value_bank = (t if t.dtype == query.dtype else t.to(query.dtype) for t in tables)
        tokens = math.prod(query.shape[:-2])
        if value_transform is not None:
            value_transform = value_transform.to(query.dtype)
            if tokens >= _TIMES_EXPANDED[body] * len(value_bank) and heads * value_bank.numel() <= MOST_EXPANDED:
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
    query: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    value_transform: torch.Tensor | None,
    k: int,
    backend: str,
) -> str:
    """Check the shapes of a call and return its backend; calls like an earlier one are looked up, unless traced."""
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
    _check_values(value_bank, value_transform, heads, n)
    body = resolve(backend, query, native_refusal=native_refusal(n, k))
    # The environment decides whether kernels run on a CPU.
    if call is not None and (body in ("torch", "native") or query.is_cuda):
        RESOLVED[call] = body
    return body


def expand_values(value_bank: torch.Tensor, value_transform: torch.Tensor) -> torch.Tensor:
    """Return the transformed bank of every head, `E_h = V W_h^T` (MIDUS, equation 24).

    Args:
        value_bank: Shared values V, `[N, v]`.
        value_transform: Transforms W_h, `[H, v, v]`.

    Returns:
        `[H, N, v]`.
    """
    with without_autocast(value_bank.device.type):
        return torch.bmm(value_bank.expand(len(value_transform), -1, -1), value_transform.transpose(1, 2).contiguous())


def _check_values(value_bank: torch.Tensor, value_transform: torch.Tensor | None, heads: int, n: int) -> None:
    shape = value_bank.shape
    if len(shape) not in (2, 3) or shape[-2] != n * n or (len(shape) == 3 and shape[0] != heads):
        raise ValueError(
            f"value_bank is {tuple(shape)}; expected [n * n, v] or [H, n * n, v] with n * n = {n * n} and H = {heads}."
        )
    if value_transform is None:
        return
    width = shape[-1]
    if len(shape) == 3:
        raise ValueError("value_transform is given with a bank per head; expected None, or a bank that heads share.")
    if value_transform.shape != (heads, width, width):
        raise ValueError(
            f"value_transform is {tuple(value_transform.shape)}; expected (H, v, v) = {(heads, width, width)}."
        )
