"""What `torch.compile` is given is one graph and computes the right numbers."""

import functools

import pytest
import torch

from benchmarks.ops import providers  # noqa: F401 - fills the table
from benchmarks.ops.gate import Expected
from benchmarks.ops.registry import PROVIDERS, make_inputs
from benchmarks.ops.shapes import SHAPES, Case


@pytest.fixture
def without_a_c_compiler(monkeypatch):
    """Graphs are traced, forward and backward, and run as they are: compiling them takes minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):  # which providers raise
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [op for op, table in PROVIDERS.items() if "compiled" in table])
def test_a_compiled_provider_is_one_graph_that_passes_the_gate(op, dtype, without_a_c_compiler):
    case = Case(op, SHAPES["tiny"], 33, "zipf", dtype, "cpu")
    inputs = make_inputs(case)
    provider = PROVIDERS[op]["compiled"]
    verdict = Expected(case, inputs).judge(provider, provider.build(case, inputs), inputs)
    assert verdict.passes, verdict
