"""The tables of the measured ops and of their implementations, called providers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.ops.roofline import Work
from benchmarks.ops.shapes import MODES, Case, Shape

Inputs = dict[str, torch.Tensor]
# The tensor that is differentiated; for ops that return the retrieved slots too, a pair of this tensor and the slots.
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], Output]


@dataclass(frozen=True)
class Op:
    """An op that is measured.

    Args:
        name: Name on the command line.
        inputs: Function that makes float32 inputs for a case.
        reference: Function that computes the result in the dtype of its inputs, here float64.
        leaves: Names of the inputs that have gradients.
        per_token: Names of the inputs whose first dimension is tokens, which the reference takes in stretches.
        elements: Function from a shape to the elements of the reference's largest intermediate for one token.
        work: Function from shape, tokens, bytes per element, and `"forward"` or `"backward"` to the work of a call.
    """

    name: str
    inputs: Callable[[Case, torch.Generator], Inputs]
    reference: Callable[[Case, Inputs], Output]
    leaves: tuple[str, ...]
    per_token: tuple[str, ...]
    elements: Callable[[Shape], int]
    work: Callable[[Shape, int, int, str], Work]


@dataclass(frozen=True)
class Provider:
    """An implementation of an op.

    Args:
        op: Name of the op.
        name: Name on the command line.
        build: Function from a case and inputs to the call that is timed; it raises `Unavailable` if there is none.
        modes: Modes of `MODES` that the provider can run.
        tolerances: RMS ratios that its gradients of tables may reach, by dtype, if they differ from the usual ones.
    """

    op: str
    name: str
    build: Callable[[Case, Inputs], Call]
    modes: tuple[str, ...]
    tolerances: dict[str, float]


class Unavailable(Exception):
    """Error that says why a provider cannot run here, or cannot run a case."""


OPS: dict[str, Op] = {}
PROVIDERS: dict[str, dict[str, Provider]] = {}


def register_op(op: Op) -> Op:
    """Register an op and return it.

    Raises:
        ValueError: If the name is taken.
    """
    if op.name in OPS:
        raise ValueError(f"op {op.name!r} is already registered; choose another name.")
    OPS[op.name] = op
    PROVIDERS[op.name] = {}
    return op


def provider(
    op: str, name: str, *, modes: tuple[str, ...] = MODES, tolerances: dict[str, float] | None = None
) -> Callable[[Callable[[Case, Inputs], Call]], Callable[[Case, Inputs], Call]]:
    """Return a decorator that registers the `build` of a `Provider`, with the arguments of `Provider`.

    Raises:
        ValueError: If the op is unknown, or already has a provider of that name.
    """
    if op not in PROVIDERS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(PROVIDERS)}.")
    if name in PROVIDERS[op]:
        raise ValueError(f"op {op} already has a provider {name!r}; choose another name.")

    def decorate(build: Callable[[Case, Inputs], Call]) -> Callable[[Case, Inputs], Call]:
        PROVIDERS[op][name] = Provider(op, name, build, modes, tolerances or {})
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
    from benchmarks.ops.roofline import peaks_of

    peaks = peaks_of(device)
    if peaks is None:
        return None
    element = getattr(torch, case.dtype).itemsize
    return math.fsum(
        OPS[case.op].work(case.shape, case.tokens, element, part).microseconds(peaks) for part in mode.split("+")
    )
