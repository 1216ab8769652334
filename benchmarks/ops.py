"""Compare the implementations (bodies) of each op: first with float64, output and all gradients; then their time and memory.

    python -m benchmarks.ops                                    # all ops, on a GPU where there is one
    python -m benchmarks.ops --ops headwise_memory --bodies auto,reference --dtype bfloat16 --tokens 1

Bodies are the backends of `op_choices`, and `compiled`: the reference under `torch.compile`. A body that differs from
float64 by more than its dtype's rounding is reported and not timed, and the command ends with status 1. Rows are
appended to `results/ops.csv`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measuring import (
    RESULTS,
    Row,
    add_device,
    add_list,
    command_line,
    is_out_of_memory,
    numbers,
    peak_bytes,
    release_memory,
    run_columns,
    tell,
    timed,
)
from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather
from midus_hf.ops.moc.op import chapter_attention
from midus_hf.ops.moda.op import depth_attention

Inputs = dict[str, torch.Tensor]

BODIES = ("auto", "reference", "compiled", "torch", "native", "triton")
MODES = ("forward", "backward")

# Largest RMS ratios that rounding alone explains, by dtype.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

# Most tokens that are compared with float64: more than one tile has, and an odd number.
_COMPARED_TOKENS = 61


@dataclass(frozen=True)
class Shape:
    """Sizes of one memory layer: H heads of width d, n sub-keys per side, and k slots retrieved per head."""

    heads: int
    head_dim: int
    n: int = 64
    k: int = 4


SHAPES = {
    "smollm2-135m": Shape(9, 64),
    "llama-3.2-1b": Shape(32, 64),
    "llama-3.1-8b": Shape(32, 128),
    "tiny": Shape(2, 16, 8),
}


@dataclass(frozen=True)
class Op:
    """An op that is measured.

    Args:
        make: Makes float32 inputs of a shape for some tokens; floating-point tensors have gradients.
        call: Computes the output that is differentiated, by a backend.
    """

    make: Callable[[Shape, int], Inputs]
    call: Callable[[Shape, Inputs, str], torch.Tensor]


def _keyed(shape: Shape, tokens: int) -> Inputs:
    keys = (shape.heads, shape.n, shape.head_dim // 2)
    scale = shape.head_dim**-0.5  # scores of order one
    query = torch.randn(tokens, shape.heads, shape.head_dim)
    return {"query": query, "row_keys": scale * torch.randn(keys), "column_keys": scale * torch.randn(keys)}


def _looked_up(shape: Shape, tokens: int) -> Inputs:
    width = shape.head_dim
    transform = torch.randn(shape.heads, width, width) / width**0.5
    bank = torch.randn(shape.n**2, width)
    return {**_keyed(shape, tokens), "value_bank": bank, "value_transform": transform}


def _gathered(shape: Shape, tokens: int) -> Inputs:
    slots = torch.randint(shape.n**2, (tokens, shape.heads * shape.k))
    bank = torch.randn(shape.n**2, shape.heads * shape.head_dim)
    return {"bank": bank, "slots": slots, "weights": torch.rand(slots.shape)}


def _opened(shape: Shape, tokens: int, chapters: int = 64, memory_tokens: int = 64, chosen: int = 4) -> Inputs:
    table = (chapters, memory_tokens, shape.heads, shape.head_dim)
    order = torch.rand(tokens, chapters).argsort(-1)
    query = torch.randn(tokens, 1, shape.heads, shape.head_dim)
    keys = torch.randn(table)
    values = torch.randn(table)
    scales = torch.rand(tokens, chosen)
    return {"query": query, "keys": keys, "values": values, "chapters": order[:, :chosen], "scales": scales}


def _stacked(shape: Shape, tokens: int, slots: int = 16) -> Inputs:
    heads = (1, shape.heads, tokens, shape.head_dim)
    names = ("query", *(f"{part} {number}" for part in ("key", "value") for number in range(slots)))
    return {name: torch.randn(heads) for name in names}


def _read_depth(shape: Shape, inputs: Inputs, backend: str) -> torch.Tensor:
    keys, values = ([inputs[name] for name in inputs if name.startswith(part)] for part in ("key", "value"))
    return depth_attention(inputs["query"], keys, values, shape.head_dim**-0.5, backend=backend)[0]


OPS = {
    "headwise_memory": Op(
        _looked_up, lambda shape, inputs, backend: headwise_memory(**inputs, k=shape.k, backend=backend)
    ),
    "product_key_topk": Op(
        _keyed, lambda shape, inputs, backend: product_key_topk(**inputs, k=shape.k, backend=backend)[0]
    ),
    "weighted_gather": Op(_gathered, lambda shape, inputs, backend: weighted_gather(**inputs, backend=backend)),
    "chapter_attention": Op(_opened, lambda shape, inputs, backend: chapter_attention(**inputs, backend=backend)),
    "depth_attention": Op(_stacked, _read_depth),
}


def make_inputs(op: Op, shape: Shape, tokens: int, dtype: torch.dtype, device: str) -> Inputs:
    """Return the inputs of an op, in which floating-point tensors are leaves with gradients."""
    torch.manual_seed(0)
    made = op.make(shape, tokens)
    return {
        name: tensor.to(device, dtype).requires_grad_() if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in made.items()
    }


def body_of(op: Op, shape: Shape, body: str) -> Callable[[Inputs], torch.Tensor]:
    """Return a function from the inputs of an op to its output, computed by one of `BODIES`."""
    if body == "compiled":
        return torch.compile(lambda inputs: op.call(shape, inputs, "reference"), dynamic=False, fullgraph=True)
    return lambda inputs: op.call(shape, inputs, body)


def results_of(call: Callable[[Inputs], torch.Tensor], inputs: Inputs, upstream: torch.Tensor | None) -> Inputs:
    """Return the output and the gradients of all inputs that have one, by name; the gradient of the output is `upstream`."""
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    output = call(inputs)
    upstream = torch.ones_like(output) if upstream is None else upstream.to(output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def largest_error(op: Op, shape: Shape, call: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> tuple[float, str]:
    """Return the largest RMS ratio of a difference from the reference in float64, and the output or gradient that has it."""
    wide = {
        name: tensor.detach().double().requires_grad_() if tensor.requires_grad else tensor
        for name, tensor in inputs.items()
    }
    exact = results_of(lambda wide: op.call(shape, wide, "reference"), wide, None)
    errors = {}
    for name, result in results_of(call, inputs, None).items():
        difference = (result.double() - exact[name]).square().mean().sqrt()
        errors[name] = (difference / exact[name].square().mean().sqrt().clamp_min(1e-30)).item()
    # NaN is larger than any number.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return errors[worst], worst


def rows(arguments: argparse.Namespace, wrong: list[str]) -> Iterator[Row]:
    """Yield a row per op, shape, number of tokens, body and mode; names of wrong results are appended to `wrong`."""
    dtype = getattr(torch, arguments.dtype)
    for name in arguments.ops:
        for shape_name in arguments.shapes:
            for tokens in arguments.tokens:
                for body in arguments.bodies:
                    case = {"op": name, "shape": shape_name, "tokens": tokens, "dtype": arguments.dtype, "body": body}
                    try:
                        yield from _rows_of_case(case, OPS[name], SHAPES[shape_name], dtype, arguments, wrong)
                    except ValueError as refusal:
                        print(f"{' '.join(map(str, case.values()))}: not measured, {refusal}", file=sys.stderr)
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        print(f"{' '.join(map(str, case.values()))}: out of memory", file=sys.stderr)
                    release_memory(arguments.device)


def _rows_of_case(
    case: Row, op: Op, shape: Shape, dtype: torch.dtype, arguments: argparse.Namespace, wrong: list[str]
) -> Iterator[Row]:
    """Yield a case's times and memory by mode, once its results are near those in float64."""
    device = arguments.device
    call = body_of(op, shape, case["body"])
    few = make_inputs(op, shape, min(case["tokens"], _COMPARED_TOKENS), dtype, device)
    error, error_of = largest_error(op, shape, call, few)
    if not error <= TOLERANCES[case["dtype"]]:
        wrong.append(" ".join(map(str, case.values())))
        print(f"{wrong[-1]}: {error_of} differs from float64 by {error:.1e}; it is not timed.", file=sys.stderr)
        return
    inputs = make_inputs(op, shape, case["tokens"], dtype, device)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call(inputs)

    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    output = call(inputs)
    upstream = torch.ones_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, leaves, upstream, retain_graph=True)

    def both() -> object:
        return results_of(call, inputs, upstream)

    for mode, run in zip(MODES, (forward, backward), strict=True):
        if mode == "backward" and case["tokens"] == 1:
            continue  # one token is generated, not trained on
        time = timed(run, arguments.seconds)
        yield case | {
            "mode": mode,
            "median_ms": round(1e3 * time.median, 4),
            "iqr_ms": round(1e3 * time.iqr, 4),
            "runs": len(time.times),
            "peak_mb": round(peak_bytes(forward if mode == "forward" else both, device) / 1e6, 2),
            "error": float(f"{error:.2g}"),
        }


COLUMNS = {name: f"{{{name}}}" for name in ("op", "shape", "tokens", "dtype", "body", "mode")}
COLUMNS |= {"ms": "{median_ms:.3f}", "peak, MB": "{peak_mb:.1f}", "error": "{error:.1e}"}


def main(command_arguments: list[str] | None = None, results: Path = RESULTS / "ops.csv") -> int:
    """Measure what the command line names; return 1 if a body was wrong, else 0."""
    parser = command_line(__doc__)
    add_device(parser)
    add_list(parser, "--ops", OPS)
    add_list(parser, "--bodies", BODIES)
    gpu = torch.cuda.is_available()
    add_list(parser, "--shapes", SHAPES, ["llama-3.2-1b", "llama-3.1-8b"] if gpu else ["smollm2-135m"])
    parser.add_argument("--tokens", type=numbers, default=[32768, 1] if gpu else [4096, 1])
    arguments = parser.parse_args(command_arguments)
    wrong: list[str] = []
    tell(rows(arguments, wrong), COLUMNS, None if arguments.no_append else results, run_columns(arguments.device))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
