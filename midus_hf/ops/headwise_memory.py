"""The head-wise memory of MIDUS: product-key retrieval per head, and values expanded per head from one shared bank."""

import torch

from midus_hf.ops.backend import OpChoices, resolve
from midus_hf.ops.direct_calls import are_plain, nobody_watches
from midus_hf.ops.headwise_lookup import headwise_lookup_op, lookup_few
from midus_hf.ops.native.headwise import native_output, native_refusal
from midus_hf.ops.packed_lookup_triton import triton_output
from midus_hf.ops.plain.product_key import headwise_memory as reference
from midus_hf.ops.precision import without_autocast
from midus_hf.ops.product_key import check_product_keys, product_key_topk
from midus_hf.ops.transformed_lookup import transformed, transformed_lookup_op
from midus_hf.ops.weighted_gather import weighted_gather

MOST_EXPANDED = 1 << 28
"""Elements of an expanded bank that are made for one forward pass: 512 MB in bfloat16."""

_TIMES_EXPANDED_IN_C = 3
"""So many tokens a slot make expanding less work for compiled C, which else transforms what it gathered while it has it at hand."""

_FEW_ROWS = 256
"""Tokens times heads up to which calls cost more than what they compute."""


def headwise_memory(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor | None,
    k: int,
    *,
    residual: torch.Tensor | None = None,
    temperature: float = 1.0,
    expand: bool | None = None,
    sparse_gradient: bool = False,
    selection: str = "auto",
    backward: str = "auto",
    backend: str = "auto",
) -> torch.Tensor:
    """Retrieve from the memory of every head (MIDUS, equations 11 to 17).

    Head `h` retrieves its `k` best of `N = n * n` slots, weighs them by the softmax of their scores, sums the rows of
    the shared bank so weighed, and maps the sum by its own transform: `M_h = W_h sum_m alpha_m V[slot_m]` (HIVE,
    equation 16). The heads' outputs stand side by side, as an attention's do.

    The transform is linear, so the rows may as well be transformed first, `E_h = V W_h^T`, and gathered then. For
    more than N tokens that is less work, forward and backward: `dV = sum_h G_h W_h` and `dW_h = G_h^T V` from the sums
    `G_h` of gradients per slot.

    Tables are cast to the dtype of the query, also under `torch.autocast`: where masters are float32 and the query is
    bfloat16, what is computed is what a bfloat16 model will compute. Sums are accumulated in float32 at least.

    Args:
        query: `[..., H, d]`, floating point: the attention output of each head.
        row_keys: `[H, n, d / 2]`, the sub-keys K^row.
        column_keys: `[H, n, d / 2]`, the sub-keys K^col.
        value_bank: `[n * n, v]`, the shared base values, with v = D / H in MIDUS; or `[H, n * n, v]`, a bank per head.
        value_transform: `[H, v, v]`, the transforms W_h; each maps a column vector, as in the paper. None where
            values are used as they are.
        k: Slots retrieved per head, `1 <= k <= n`.
        residual: `[..., H, v]`, any floating dtype, which the output then has; added to what is retrieved. Default: none.
        temperature: Scores are divided by it before the softmax. Default: 1.
        expand: Whether rows are transformed before they are gathered. Default: where that is less work, which in C it is from
            three tokens a slot on.
        sparse_gradient: Whether the gradient of `value_bank` is a coalesced sparse tensor of the rows that were hit, for
            banks of which a batch hits few: for `torch.optim.SparseAdam` and SGD, as Adam and AdamW refuse sparse gradients.
            Rows are then transformed after they are gathered, and their gradients always summed in order; scores of all
            sub-keys are held. Default: false.
        selection: As in `OpChoices`. Default: `"auto"`.
        backward: As in `OpChoices`. Default: `"auto"`.
        backend: As in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., H, v]`, the dtype of `query`, or of `residual` if there is one.

    Raises:
        ValueError: If the shapes disagree, `k` lies outside `1..n`, or `expand` is asked for with `sparse_gradient`.
    """
    check_product_keys(query, row_keys, column_keys, k)
    heads, n, _ = row_keys.shape
    _check_values(value_bank, value_transform, heads, n)
    choices = resolve(backend, selection, backward, query, native_refusal=native_refusal(n, k))
    if sparse_gradient and expand:
        raise ValueError(
            "expand is true with sparse_gradient; expected false or None, since an expanded bank is hit all over."
        )
    with without_autocast(query.device.type):
        tables = (row_keys, column_keys, value_bank)
        row_keys, column_keys, value_bank = (t if t.dtype == query.dtype else t.to(query.dtype) for t in tables)
        value_transform = None if value_transform is None else value_transform.to(query.dtype)
        if choices.backend == "reference":
            return reference(query, *tables, value_transform, k, residual=residual, temperature=temperature)
        if sparse_gradient:
            output = _gathered_sparsely(query, row_keys, column_keys, value_bank, k, temperature, choices)
            return _added(residual, output if value_transform is None else transformed(output, value_transform))

        tokens = query.shape[:-2].numel()
        in_c = choices.backend == "native" and (choices.selection, choices.backward) == ("two-stage", "sorted")
        if value_transform is not None and expand is None:
            fewest = (_TIMES_EXPANDED_IN_C if in_c else 1) * n * n
            expand = tokens >= fewest and heads * value_bank.numel() <= MOST_EXPANDED
        if value_transform is not None and expand:
            value_bank, value_transform = expand_values(value_bank, value_transform), None
        added = None
        if residual is not None and (value_transform is None or in_c):
            added = _shaped(residual, (tokens, heads, value_bank.shape[-1]))
        flat_query = _shaped(query, (tokens, heads, query.shape[-1]))
        arguments = (flat_query, row_keys, column_keys, value_bank)
        if value_transform is not None and in_c:
            output = _transformed_in_c(*arguments, value_transform, added, k, temperature)
        else:
            output = _looked_up(*arguments, added, k, temperature, choices)  # [S, H, v]
            output = output if value_transform is None else transformed(output, value_transform)
        output = _shaped(output, (*query.shape[:-1], output.shape[-1]))
        return output if added is not None else _added(residual, output)


def expand_values(value_bank: torch.Tensor, value_transform: torch.Tensor) -> torch.Tensor:
    """The bank of every head, `E_h = V W_h^T` (MIDUS, equation 24).

    Args:
        value_bank: `[N, v]`.
        value_transform: `[H, v, v]`.

    Returns:
        `[H, N, v]`.
    """
    with without_autocast(value_bank.device.type):
        return torch.bmm(value_bank.expand(len(value_transform), -1, -1), value_transform.transpose(1, 2).contiguous())


def _gathered_sparsely(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    k: int,
    temperature: float,
    choices: OpChoices,
) -> torch.Tensor:
    """What every head retrieves, with a gradient of `value_bank` that is sparse."""
    scores, slots = product_key_topk(
        query, row_keys, column_keys, k, selection=choices.selection, backend=choices.backend
    )
    if value_bank.dim() == 3:
        slots = slots + _first_slots(len(row_keys), row_keys.shape[1], slots.device)
    weights = (scores / temperature).softmax(dim=-1)
    return weighted_gather(value_bank, slots, weights, sparse_gradient=True, backend=choices.backend)


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in this shape: to ask PyTorch for the one that it has takes several times as long as to see that it has it."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _added(residual: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
    """The residual, in its dtype, with the output added to it."""
    return output if residual is None else (residual + output).to(residual.dtype)


def _looked_up(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    temperature: float,
    choices: OpChoices,
) -> torch.Tensor:
    """What `headwise_lookup` gives, `[S, H, v]`; where nothing needs the registered op, by calling its body."""
    arguments = (query, row_keys, column_keys, bank, residual, k, temperature)
    body = choices.backend
    if (
        nobody_watches()
        and choices.selection == "two-stage"
        and are_plain(query, row_keys, column_keys, bank, query if residual is None else residual)
    ):
        if body == "native":
            return native_output(*arguments)
        if body == "triton":
            return triton_output(*arguments, choices.exact)
        if query.shape[0] * query.shape[1] <= _FEW_ROWS:
            return _added(residual, lookup_few(query, row_keys, column_keys, bank, k, temperature))
    return headwise_lookup_op(*arguments, choices.exact, choices.selection, choices.backward, body)[0]


def _transformed_in_c(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    value_transform: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    temperature: float,
) -> torch.Tensor:
    """What `transformed_lookup` gives, `[S, H, v]`; where nothing needs the registered op, by calling its body."""
    added = query if residual is None else residual
    if nobody_watches() and are_plain(query, row_keys, column_keys, bank, value_transform, added):
        return native_output(query, row_keys, column_keys, bank, residual, k, temperature, value_transform)
    return transformed_lookup_op(query, row_keys, column_keys, bank, value_transform, residual, k, temperature)[0]


def _first_slots(heads: int, n: int, device: torch.device) -> torch.Tensor:
    """Where the slots of each head begin in a bank of all heads: `[H, 1]`."""
    return n * n * torch.arange(heads, device=device).unsqueeze(-1)


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
