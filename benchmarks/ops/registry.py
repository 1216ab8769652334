"""The tables of ops that are measured and of their implementations, called providers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.ops.roofline import Work
from benchmarks.ops.shapes import MODES, Case, Shape

Inputs = dict[str, torch.Tensor]
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What is differentiated, and with it the slots that were retrieved where those are a result as well."""
Call = Callable[[], Output]


@dataclass(frozen=True)
class Op:
    """An op that is measured.

    Args:
        name: As on the command line.
        inputs: Makes float32 inputs for a case.
        reference: Computes the result in the dtype of its inputs, here float64.
        leaves: Names of the inputs that have gradients.
        per_token: Names of the inputs whose first dimension is tokens, so that the reference can go in stretches.
        elements: Elements of the largest intermediate of the reference for one token.
        work: `(shape, tokens, bytes of an element, "forward" or "backward")` to what must be done.
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
        op: The op's name.
        name: As on the command line.
        build: Makes the call that is timed from a case and inputs; raises `Unavailable` where it cannot.
        modes: What it can do of `MODES`.
        tolerances: RMS ratios that it may reach, by dtype, where they differ from the usual ones.
    """

    op: str
    name: str
    build: Callable[[Case, Inputs], Call]
    modes: tuple[str, ...]
    tolerances: dict[str, float]


class Unavailable(Exception):
    """A provider cannot run here, or not this case; says why."""


OPS: dict[str, Op] = {}
PROVIDERS: dict[str, dict[str, Provider]] = {}


def register_op(op: Op) -> Op:
    """Enter an op.

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
    """Register an implementation of an op; arguments as in `Provider`.

    Raises:
        ValueError: If the op is unknown, or has a provider of that name.
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
    """Inputs of a case on its device; those that have gradients are leaves, in its dtype."""
    op = OPS[case.op]
    generator = torch.Generator(case.device).manual_seed(seed)
    made = op.inputs(case, generator)
    dtype = getattr(torch, case.dtype)
    return {name: tensor.to(dtype).requires_grad_() if name in op.leaves else tensor for name, tensor in made.items()}


def roofline_microseconds(case: Case, mode: str, device: str) -> float | None:
    """The least time for a mode of `MODES` on a device by its name; None where its peaks are not known."""
    from benchmarks.ops.roofline import peaks_of

    peaks = peaks_of(device)
    if peaks is None:
        return None
    element = getattr(torch, case.dtype).itemsize
    return math.fsum(
        OPS[case.op].work(case.shape, case.tokens, element, part).microseconds(peaks) for part in mode.split("+")
    )
