"""The ops that are measured: their inputs, their float64 reference and the work that they are."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.ops.inputs import draw_sub_keys, retrieval_inputs, slots_of, value_inputs
from benchmarks.ops.registry import Inputs, Op, Output, register_op
from benchmarks.ops.roofline import bag_work, headwise_work, product_key_memory_work, selection_work
from benchmarks.ops.shapes import Case
from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather


def _headwise_inputs(case: Case, generator: torch.Generator) -> Inputs:
    return {**retrieval_inputs(case, generator)[0], **value_inputs(case, generator)}


def _headwise_reference(case: Case, inputs: Inputs) -> Output:
    return headwise_memory(**inputs, k=case.shape.k, backend="reference")


def _selection_inputs(case: Case, generator: torch.Generator) -> Inputs:
    return retrieval_inputs(case, generator)[0]


def _selection_reference(case: Case, inputs: Inputs) -> Output:
    return product_key_topk(**inputs, k=case.shape.k, backend="reference")


def _bag_inputs(case: Case, generator: torch.Generator) -> Inputs:
    shape = case.shape
    slots = slots_of(case, draw_sub_keys(case, generator), draw_sub_keys(case, generator))
    weights = torch.rand(slots.shape, generator=generator, device=case.device)
    bank = torch.randn(shape.slots, shape.width, generator=generator, device=case.device)
    return {
        "bank": bank,
        "slots": slots.flatten(1),
        "weights": (weights / weights.sum(-1, keepdim=True)).flatten(1),
    }


def _bag_reference(case: Case, inputs: Inputs) -> Output:
    return weighted_gather(inputs["bank"], inputs["slots"], inputs["weights"], backend="reference")


def _product_key_memory_inputs(case: Case, generator: torch.Generator) -> Inputs:
    bank = torch.randn(case.shape.slots, case.shape.width, generator=generator, device=case.device)
    return {**retrieval_inputs(case, generator)[0], "bank": bank}


def product_key_memory(
    case: Case, inputs: Inputs, backend: str, gather: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """Compute Lample et al. (2019) from queries on: select, weigh by a softmax per head, sum the heads' rows of one bank.

    Args:
        case: That is measured.
        inputs: Of the op.
        backend: As in `OpChoices`.
        gather: Called with bank, slots and weights. Default: `weighted_gather`.
    """
    query, row_keys, column_keys, bank = inputs.values()
    scores, slots = product_key_topk(query, row_keys, column_keys, case.shape.k, backend=backend)
    weights = scores.softmax(-1)
    gather = gather or partial(weighted_gather, backend=backend)
    return gather(bank, slots.flatten(-2), weights.flatten(-2))


def _product_key_memory_reference(case: Case, inputs: Inputs) -> Output:
    return product_key_memory(case, inputs, "reference")


_QUERY_AND_KEYS = ("query", "row_keys", "column_keys")

register_op(
    Op(
        name="headwise_memory",
        inputs=_headwise_inputs,
        reference=_headwise_reference,
        leaves=(*_QUERY_AND_KEYS, "value_bank", "value_transform"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.head_dim,
        work=headwise_work,
    )
)
register_op(
    Op(
        name="product_key_topk",
        inputs=_selection_inputs,
        reference=_selection_reference,
        leaves=_QUERY_AND_KEYS,
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.n,
        work=selection_work,
    )
)
register_op(
    Op(
        name="weighted_gather",
        inputs=_bag_inputs,
        reference=_bag_reference,
        leaves=("bank", "weights"),
        per_token=("slots", "weights"),
        elements=lambda shape: shape.heads * shape.k * shape.width,
        work=bag_work,
    )
)
register_op(
    Op(
        name="product_key_memory",
        inputs=_product_key_memory_inputs,
        reference=_product_key_memory_reference,
        leaves=(*_QUERY_AND_KEYS, "bank"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.width,
        work=product_key_memory_work,
    )
)
