"""The gate before timing: output and gradients of a provider are compared with float64."""

import math
from dataclasses import dataclass, replace

import torch

from benchmarks.ops.operations import OPS, Call, Inputs, Output, Provider
from benchmarks.ops.shapes import Case

# Tokens of the small shape: fewer than any tile has, and an odd number.
SMALL_TOKENS = 61

# Largest RMS ratios that rounding alone explains, by dtype.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

# Most elements of one intermediate of the reference: 1 GB in float64.
_MOST_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Verdict:
    """Difference of a provider from float64: the RMS ratio of the output or gradient that is worst for its tolerance.

    The ratio is infinite if slots differ.
    """

    error: float
    error_of: str
    tolerance: float

    @property
    def passes(self) -> bool:
        """True if the error is within the tolerance; false for NaN."""
        return self.error <= self.tolerance


class Expected:
    """Results of a case in float64 on the inputs that providers get, computed once for all providers."""

    def __init__(self, case: Case, inputs: Inputs):
        op = OPS[case.op]
        generator = torch.Generator(case.device).manual_seed(1)
        wide = {name: t.detach().double() if t.is_floating_point() else t for name, t in inputs.items()}
        wide = {name: t.requires_grad_() if name in op.leaves else t for name, t in wide.items()}
        stretch = max(1, _MOST_ELEMENTS // op.elements(case.shape))
        outputs, slots, upstream = [], [], []
        for first in range(0, case.tokens, stretch):
            part = {name: t[first : first + stretch] if name in op.per_token else t for name, t in wide.items()}
            output, retrieved = _split(op.reference(case, part))
            gradient = torch.randn(output.shape, generator=generator, device=case.device).to(
                inputs[op.leaves[0]].dtype
            )
            output.backward(gradient.double())
            outputs.append(output.detach())
            upstream.append(gradient)
            slots.append(retrieved)
        self.case = case
        self.output = torch.cat(outputs)
        self.slots = None if slots[0] is None else torch.cat(slots)
        self.upstream = torch.cat(upstream)
        self.gradients = {name: wide[name].grad for name in op.leaves}

    def judge(self, provider: Provider, call: Call, inputs: Inputs) -> Verdict:
        """Run a provider and compare its output, its slots, and its gradients if it has any."""
        output, slots = _split(call())
        ratios = {"output": rms_ratio(output, self.output)}
        if slots is not None and self.slots is not None:
            agree = torch.equal(slots.long().sort(-1).values, self.slots.sort(-1).values)
            ratios["slots"] = 0.0 if agree else math.inf
        if "backward" in provider.modes and output.shape == self.output.shape:
            leaves = OPS[self.case.op].leaves
            gradients = torch.autograd.grad(output, [inputs[name] for name in leaves], self.upstream.to(output.dtype))
            for name, gradient in zip(leaves, gradients, strict=True):
                ratios[f"gradient of {name}"] = rms_ratio(gradient.to_dense(), self.gradients[name])
        usual = TOLERANCES[self.case.dtype]
        # Providers may have their own tolerance only for gradients of tables, whose sums some round more often.
        loose = {f"gradient of {name}" for name in ("value_bank", "value_transform", "bank")}
        tolerances = {
            name: provider.tolerances.get(self.case.dtype, usual) if name in loose else usual for name in ratios
        }
        worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name] / tolerances[name])
        return Verdict(ratios[worst], worst, tolerances[worst])


def small_case(case: Case) -> Case:
    """Return the same case with few tokens."""
    return replace(case, tokens=min(case.tokens, SMALL_TOKENS))


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference over the root mean square of `expected`; infinite if shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.detach().double() - expected).square().mean().sqrt()
    return (difference / expected.square().mean().sqrt().clamp_min(1e-30)).item()


def _split(output: Output) -> tuple[torch.Tensor, torch.Tensor | None]:
    return output if isinstance(output, tuple) else (output, None)
