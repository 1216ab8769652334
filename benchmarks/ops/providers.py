"""This project's implementations, and implementations that one would write with PyTorch alone."""

import inspect
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.ops.operations import Call, Inputs, Unavailable, product_key_memory, provider
from benchmarks.ops.shapes import Case
from midus_hf.ops import expand_values, headwise_memory, product_key_topk, weighted_gather
from midus_hf.ops.gather.row_sums import weight_gradients, weighted_rows
from midus_hf.ops.product_key.reference import sub_key_scores

_MOST_GRID_ELEMENTS = 1 << 24
# Tolerances of Algorithm 1, which sums gradients in half precision, as printed: on a GPU, each addition to a row is
# rounded.
_ALGORITHM_1_TOLERANCES = {"bfloat16": 0.5, "float16": 0.1}


def compiled(function: Callable[..., Any], case: Case, mode: str | None = None) -> Callable[..., Any]:
    """Return a function under `torch.compile`, for fixed shapes and in one graph."""
    if not any(shutil.which(name) for name in ("g++", "gcc", "clang++", "clang")):
        raise Unavailable("torch.compile calls a C compiler, and there is none")
    torch._dynamo.config.recompile_limit = 64  # one for each shape and mode
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)


def expand_then_gather(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Compute head-wise memory as the fastest plain program does: transform all slots for all heads, then gather k rows.

    Scores and gradients of rows are summed in float32, as a correct result needs. Selections are unsorted, and rows are
    weighted by a product and a sum instead of an einsum, so that the compiler fuses them with the gather.

    Args:
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        value_bank: `[n * n, d]`.
        value_transform: `[H, d, d]`.
        k: Slots retrieved per head.

    Returns:
        `[S, H, d]`, the dtype of `query`.
    """
    heads, n, half = row_keys.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    query_row, query_column = query.to(wide).split(half, dim=-1)
    row_best, rows = torch.einsum("shp,hnp->shn", query_row, row_keys.to(wide)).topk(k, dim=-1, sorted=False)
    column_best, columns = torch.einsum("shp,hnp->shn", query_column, column_keys.to(wide)).topk(
        k, dim=-1, sorted=False
    )
    sums = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2)  # [S, H, k * k]
    scores, pairs = sums.topk(k, dim=-1, sorted=False)
    slots = rows.gather(-1, pairs // k) * n + columns.gather(-1, pairs % k)  # [S, H, k]
    expanded = torch.bmm(value_bank.expand(heads, -1, -1), value_transform.transpose(1, 2))  # [H, n * n, d]
    first_slots = n * n * torch.arange(heads, device=slots.device).unsqueeze(-1)
    retrieved = F.embedding(slots + first_slots, expanded.flatten(0, 1).to(wide))  # [S, H, k, d]
    return (scores.softmax(-1).unsqueeze(-1) * retrieved).sum(-2).to(query.dtype)


def cartesian_topk(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `product_key_topk` by one selection over the Cartesian grid of all slots (MIDUS, equations 21 and 22)."""
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)
    grid = (row_scores.unsqueeze(-1) + column_scores.unsqueeze(-2)).flatten(-2)  # [S, H, n * n]
    scores, slots = grid.topk(k, dim=-1)
    return scores, slots


def _require_small_grid(case: Case) -> None:
    elements = case.tokens * case.shape.heads * case.shape.slots
    if elements > _MOST_GRID_ELEMENTS:
        raise Unavailable(f"the grid of all slots would have {elements:,} elements")


def gather_by_algorithm_1(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute `weighted_gather` of a bank `[R, v]`, slots and weights `[S, m]`; Algorithm 1 sums the bank's gradient."""
    return _Algorithm1.apply(bank, slots, weights)


class _Algorithm1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bank, slots, weights)
        return weighted_rows(bank, slots, weights, "torch")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        bank, slots, weights = ctx.saved_tensors
        expanded = gradient.unsqueeze(1).expand(-1, slots.shape[1], -1)
        # [S * m, v], in half precision as printed
        terms = (expanded * weights.to(gradient.dtype).unsqueeze(-1)).flatten(0, 1)
        unique, inverse = torch.unique(slots.flatten(), return_inverse=True)
        aggregated = terms.new_zeros(len(unique), terms.shape[1]).index_add_(0, inverse, terms)
        into_bank = terms.new_zeros(bank.shape).index_add_(0, unique, aggregated)
        return into_bank.to(bank.dtype), None, weight_gradients(gradient, bank, slots, "torch").to(weights.dtype)


def _calling(
    function: Callable[..., Any], is_compiled: bool = False, **options: Any
) -> Callable[[Case, Inputs], Call]:
    """Return the `build` of a provider that calls a function with the inputs of a case."""
    takes_k = "k" in inspect.signature(function).parameters

    def build(case: Case, inputs: Inputs) -> Call:
        called = compiled(function, case) if is_compiled else function
        sizes = {"k": case.shape.k} if takes_k else {}
        return lambda: called(**inputs, **sizes, **options)

    return build


def _product_key_memory(backend: str) -> Callable[[Case, Inputs], Call]:
    """Return the `build` of a provider that selects product keys and gathers their rows."""
    return lambda case, inputs: partial(product_key_memory, case, inputs, backend)


for _op, _name, _build in (
    ("headwise_memory", "naive", _calling(headwise_memory, backend="reference")),
    ("headwise_memory", "compiled", _calling(headwise_memory, is_compiled=True, backend="reference")),
    ("headwise_memory", "expand-compiled", _calling(expand_then_gather, is_compiled=True)),
    ("headwise_memory", "sorted", _calling(headwise_memory)),
    ("headwise_memory", "torch", _calling(headwise_memory, backend="torch")),
    ("product_key_topk", "naive", _calling(product_key_topk, backend="reference")),
    ("product_key_topk", "compiled", _calling(product_key_topk, is_compiled=True, backend="reference")),
    ("product_key_topk", "two-stage", _calling(product_key_topk)),
    ("weighted_gather", "naive", _calling(weighted_gather, backend="reference")),
    ("weighted_gather", "sorted", _calling(weighted_gather)),
    ("weighted_gather", "sparse", _calling(weighted_gather, sparse_gradient=True)),
    ("product_key_memory", "naive", _product_key_memory("reference")),
    ("product_key_memory", "sorted", _product_key_memory("auto")),
):
    provider(_op, _name)(_build)
provider("weighted_gather", "algorithm-1", tolerances=_ALGORITHM_1_TOLERANCES)(_calling(gather_by_algorithm_1))


@provider("headwise_memory", "expand-max-autotune")
def _headwise_expand_max_autotune(case: Case, inputs: Inputs) -> Call:
    if case.device == "cpu":
        raise Unavailable("max-autotune tries kernels of a GPU; on a CPU it compiles what expand-compiled does")
    # Without CUDA graphs: a replay would hide the host's time, which is measured.
    function = compiled(expand_then_gather, case, mode="max-autotune-no-cudagraphs")
    return lambda: function(**inputs, k=case.shape.k)


@provider("headwise_memory", "embedding-bag")
def _headwise_embedding_bag(case: Case, inputs: Inputs) -> Call:
    query, row_keys, column_keys, bank, transform = inputs.values()
    n, k = case.shape.n, case.shape.k

    def run() -> torch.Tensor:
        halves = query.float().split(row_keys.shape[-1], dim=-1)
        row_scores = torch.einsum("shp,hnp->shn", halves[0], row_keys.float())
        column_scores = torch.einsum("shp,hnp->shn", halves[1], column_keys.float())
        row_best, rows = row_scores.topk(k, dim=-1)
        column_best, columns = column_scores.topk(k, dim=-1)
        scores, pairs = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2).topk(k, dim=-1)
        slots = rows.gather(-1, pairs // k) * n + columns.gather(-1, pairs % k)
        sums = F.embedding_bag(
            slots.flatten(0, 1), bank.float(), per_sample_weights=scores.softmax(-1).flatten(0, 1), mode="sum"
        ).to(bank.dtype)
        return torch.einsum("shv,hwv->shw", sums.unflatten(0, query.shape[:2]), transform)

    return run


@provider("headwise_memory", "algorithm-1", tolerances=_ALGORITHM_1_TOLERANCES)
def _headwise_algorithm_1(case: Case, inputs: Inputs) -> Call:
    """Gather values first and transform them afterwards, with gradients by Algorithm 1, as the paper does."""
    query, row_keys, column_keys, bank, transform = inputs.values()

    def run() -> torch.Tensor:
        scores, slots = product_key_topk(query, row_keys, column_keys, case.shape.k)
        rows = gather_by_algorithm_1(bank, slots.flatten(0, 1), scores.softmax(-1).flatten(0, 1))
        return torch.einsum("shv,hwv->shw", rows.unflatten(0, query.shape[:2]), transform)

    return run


@provider("headwise_memory", "native")
def _headwise_native(case: Case, inputs: Inputs) -> Call:
    def run() -> torch.Tensor:
        return headwise_memory(**inputs, k=case.shape.k, backend="native")

    try:
        with torch.no_grad():
            run()
    except ValueError as refusal:
        raise Unavailable(str(refusal)) from None
    return run


@provider("headwise_memory", "cartesian")
def _headwise_cartesian(case: Case, inputs: Inputs) -> Call:
    _require_small_grid(case)
    query, row_keys, column_keys, bank, transform = inputs.values()

    def run() -> torch.Tensor:
        scores, slots = cartesian_topk(query, row_keys, column_keys, case.shape.k)
        rows = weighted_gather(bank, slots, scores.softmax(-1))
        return torch.einsum("shv,hwv->shw", rows, transform)

    return run


@provider("headwise_memory", "kept-values", modes=("forward",))
def _headwise_kept_values(case: Case, inputs: Inputs) -> Call:
    """Expand values beforehand, as a model does for generation (MIDUS, appendix C.2)."""
    query, row_keys, column_keys, bank, transform = inputs.values()
    with torch.no_grad():
        expanded = expand_values(bank, transform)
    return lambda: headwise_memory(query, row_keys, column_keys, expanded, None, case.shape.k)


@provider("product_key_topk", "cartesian")
def _selection_cartesian(case: Case, inputs: Inputs) -> Call:
    _require_small_grid(case)
    return lambda: cartesian_topk(**inputs, k=case.shape.k)


@provider("weighted_gather", "embedding-bag", tolerances={"bfloat16": 5e-2})
def _bag_embedding_bag(case: Case, inputs: Inputs) -> Call:
    """Sum with weights and sums in the dtype of the bank; not every PyTorch has the gradient of half-precision weights."""
    bank, slots, weights = inputs.values()

    def run(first: int | None = None) -> torch.Tensor:
        some = weights[:first].to(bank.dtype)
        return F.embedding_bag(slots[:first], bank, per_sample_weights=some, mode="sum")

    try:
        torch.autograd.grad(run(1).sum(), (bank, weights))
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0]) from None
    return run


@provider("weighted_gather", "dense")
def _bag_dense(case: Case, inputs: Inputs) -> Call:
    """Multiply a matrix of weights `[S, N]` with the bank: more work than gathering rows, but on tensor cores."""
    bank, slots, weights = inputs.values()

    def run() -> torch.Tensor:
        spread = torch.zeros(len(slots), len(bank), dtype=weights.dtype, device=bank.device)
        return spread.scatter_add(1, slots, weights).to(bank.dtype) @ bank

    return run
