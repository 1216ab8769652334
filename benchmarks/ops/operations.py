"""The ops that are measured, with their inputs, their float64 reference and their work, and the table of their providers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.ops.inputs import draw_sub_keys, retrieval_inputs, slots_of, value_inputs
from benchmarks.ops.roofline import Work, bag_work, headwise_work, peaks_of, product_key_memory_work, selection_work
from benchmarks.ops.shapes import MODES, Case, Shape
from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather

Inputs = dict[str, torch.Tensor]
# The tensor that is differentiated; for ops that return the retrieved slots too, a pair of this tensor and the slots.
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], Output]


@dataclass(frozen=True)
class Op:
    """An op that is measured.

    Args:
        inputs: Function that makes float32 inputs for a case.
        reference: Function that computes the result in the dtype of its inputs, here float64.
        leaves: Names of the inputs that have gradients.
        per_token: Names of the inputs whose first dimension is tokens, which the reference takes in stretches.
        elements: Function from a shape to the elements of the reference's largest intermediate for one token.
        work: Function from shape, tokens, bytes per element, and `"forward"` or `"backward"` to the work of a call.
    """

    inputs: Callable[[Case, torch.Generator], Inputs]
    reference: Callable[[Case, Inputs], Output]
    leaves: tuple[str, ...]
    per_token: tuple[str, ...]
    elements: Callable[[Shape], int]
    work: Callable[[Shape, int, int, str], Work]


@dataclass(frozen=True)
class Provider:
    """An implementation of an op.

    `build` makes the call that is timed, or raises `Unavailable`. `tolerances` are RMS ratios that its gradients of tables may
    reach, by dtype, if they differ from the usual ones.
    """

    name: str
    build: Callable[[Case, Inputs], Call]
    modes: tuple[str, ...]
    tolerances: dict[str, float]


class Unavailable(Exception):
    """Error that says why a provider cannot run here, or cannot run a case."""


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
    """Compute the memory of Lample et al. (2019) from queries on: select, weigh by a softmax per head, sum rows of one bank."""
    query, row_keys, column_keys, bank = inputs.values()
    scores, slots = product_key_topk(query, row_keys, column_keys, case.shape.k, backend=backend)
    weights = scores.softmax(-1)
    gather = gather or partial(weighted_gather, backend=backend)
    return gather(bank, slots.flatten(-2), weights.flatten(-2))


_QUERY_AND_KEYS = ("query", "row_keys", "column_keys")

OPS = {
    "headwise_memory": Op(
        inputs=lambda case, generator: {**retrieval_inputs(case, generator)[0], **value_inputs(case, generator)},
        reference=lambda case, inputs: headwise_memory(**inputs, k=case.shape.k, backend="reference"),
        leaves=(*_QUERY_AND_KEYS, "value_bank", "value_transform"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.head_dim,
        work=headwise_work,
    ),
    "product_key_topk": Op(
        inputs=lambda case, generator: retrieval_inputs(case, generator)[0],
        reference=lambda case, inputs: product_key_topk(**inputs, k=case.shape.k, backend="reference"),
        leaves=_QUERY_AND_KEYS,
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.n,
        work=selection_work,
    ),
    "weighted_gather": Op(
        inputs=_bag_inputs,
        reference=lambda case, inputs: weighted_gather(**inputs, backend="reference"),
        leaves=("bank", "weights"),
        per_token=("slots", "weights"),
        elements=lambda shape: shape.heads * shape.k * shape.width,
        work=bag_work,
    ),
    "product_key_memory": Op(
        inputs=_product_key_memory_inputs,
        reference=lambda case, inputs: product_key_memory(case, inputs, "reference"),
        leaves=(*_QUERY_AND_KEYS, "bank"),
        per_token=("query",),
        elements=lambda shape: shape.heads * shape.k * shape.width,
        work=product_key_memory_work,
    ),
}

# Filled by `providers.py`.
PROVIDERS: dict[str, dict[str, Provider]] = {op: {} for op in OPS}


def provider(
    op: str, name: str, *, modes: tuple[str, ...] = MODES, tolerances: dict[str, float] | None = None
) -> Callable[[Callable[[Case, Inputs], Call]], Callable[[Case, Inputs], Call]]:
    """Return a decorator that enters the `build` of a provider into the table, with the arguments of `Provider`."""

    def decorate(build: Callable[[Case, Inputs], Call]) -> Callable[[Case, Inputs], Call]:
        assert name not in PROVIDERS[op], name
        PROVIDERS[op][name] = Provider(name, build, modes, tolerances or {})
        return build

    return decorate


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Return the inputs of a case on its device; inputs that have gradients are leaves in the case's dtype."""
    op = OPS[case.op]
    generator = torch.Generator(case.device).manual_seed(seed)
    made = op.inputs(case, generator)
    dtype = getattr(torch, case.dtype)
    return {name: tensor.to(dtype).requires_grad_() if name in op.leaves else tensor for name, tensor in made.items()}


def roofline_microseconds(case: Case, mode: str, device: str) -> float | None:
    """Return the least time of a mode of `MODES` on a named device, in microseconds; None if its peaks are unknown."""
    peaks = peaks_of(device)
    if peaks is None:
        return None
    element, work = getattr(torch, case.dtype).itemsize, OPS[case.op].work
    return math.fsum(work(case.shape, case.tokens, element, part).microseconds(peaks) for part in mode.split("+"))
