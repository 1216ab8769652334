"""The ops that are measured: their inputs, their float64 reference and their work."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.ops.inputs import draw_sub_keys, retrieval_inputs, slots_of, value_inputs
from benchmarks.ops.registry import Inputs, Op, register_op
from benchmarks.ops.roofline import bag_work, headwise_work, product_key_memory_work, selection_work
from benchmarks.ops.shapes import Case
from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather


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


def _product_key_memory_inputs(case: Case, generator: torch.Generator) -> Inputs:
    bank = torch.randn(case.shape.slots, case.shape.width, generator=generator, device=case.device)
    return {**retrieval_inputs(case, generator)[0], "bank": bank}


def product_key_memory(
    case: Case, inputs: Inputs, backend: str, gather: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """Compute the memory of Lample et al. (2019) from queries on: select, weigh by a softmax per head, sum rows of one bank.

    Args:
        case: The measured case.
        inputs: Inputs of the op: query, row keys, column keys and bank.
        backend: Body to run, as in `OpChoices`.
        gather: Function of bank, slots and weights. Default: `weighted_gather`.
    """
    query, row_keys, column_keys, bank = inputs.values()
    scores, slots = product_key_topk(query, row_keys, column_keys, case.shape.k, backend=backend)
    weights = scores.softmax(-1)
    gather = gather or partial(weighted_gather, backend=backend)
    return gather(bank, slots.flatten(-2), weights.flatten(-2))


_QUERY_AND_KEYS = ("query", "row_keys", "column_keys")

register_op(
    Op(
        name="headwise_memory",
        inputs=lambda case, generator: {**retrieval_inputs(case, generator)[0], **value_inputs(case, generator)},
        reference=lambda case, inputs: headwise_memory(**inputs, k=case.shape.k, backend="reference"),
        leaves=(*_QUERY_AND_KEYS, "value_bank", "value_transform"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.head_dim,
        work=headwise_work,
    )
)
register_op(
    Op(
        name="product_key_topk",
        inputs=lambda case, generator: retrieval_inputs(case, generator)[0],
        reference=lambda case, inputs: product_key_topk(**inputs, k=case.shape.k, backend="reference"),
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
        reference=lambda case, inputs: weighted_gather(**inputs, backend="reference"),
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
        reference=lambda case, inputs: product_key_memory(case, inputs, "reference"),
        leaves=(*_QUERY_AND_KEYS, "bank"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.width,
        work=product_key_memory_work,
    )
)
