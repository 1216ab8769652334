"""`torch.compile(fullgraph=True)` takes the whole model as one graph, and decoding steps as one for all positions."""

import os
from typing import Any

import pytest
import torch
from models.cases import CASES
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import prompt
from transformers import CompileConfig, StaticCache

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import CACHE

MEMORIES = ["midus-hml", "midus-pkm", "linear", "chunk", "ultramem own", "ultramem skip"]
MEMORIES += ["depth default", "depth joint", "depth projected"]
USUAL = [("llama", case) for case in ("chunk", "ultramem skip", "depth default")]
USUAL += [("gemma3", "midus-pkm")]
FEWEST = [("llama", "chunk"), ("gemma3", "midus-pkm")]
ALL = [(family, case) for family in ("llama", "qwen3", "gemma3") for case in MEMORIES]
LENGTH = 16


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def output_and_gradients(model: torch.nn.Module, given: torch.Tensor, forward: Any) -> dict[str, torch.Tensor]:
    output = forward(given)
    output = getattr(output, "logits", output)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(output, list(parameters.values()), upstream)
    return {"output": output.detach(), **dict(zip(parameters, gradients, strict=True))}


def test_cached_step_is_one_graph_with_one_call_of_the_op():
    model, graphs, logits = upscaled_model("llama", attention="eager", num_hidden_layers=2, new_layers=(1,)), [], []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    for forward in (model, torch.compile(model, fullgraph=True, backend=counting)):
        cache = StaticCache(model.config, max_cache_len=26)
        with torch.no_grad(), decode_cache(model):
            model(input_ids=prompt(), **{CACHE: cache}, use_cache=True)
            logits.append(forward(input_ids=prompt(1), **{CACHE: cache}, use_cache=True).logits)
    assert torch.equal(logits[0], logits[1])
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")]
    # With a transform, what C computes on a CPU is an op of its own.
    assert sum(name.startswith("midus_hf.headwise_lookup") for name in called) == 1


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="inductor does not support ATEN_CPU_CAPABILITY=default on every processor",
)
@pytest.mark.parametrize("part", by_default(["model.layers.0.memory"], ["model.layers.0.memory", ""]))
def test_inductor_compiles_memory_and_model_for_training(part):
    model = upscaled_model("llama", num_hidden_layers=1, new_layers=(0,)).get_submodule(part)
    given = prompt() if part == "" else torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, fullgraph=True)
    results = [output_and_gradients(model, given, forward) for forward in (model, compiled)]
    # Fused kernels add in another order.
    torch.testing.assert_close(results[1].pop("output"), results[0].pop("output"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "case"), by_default(USUAL, ALL, fewest=FEWEST))
def test_static_cache_generation_compiles_once(name, case, tmp_path):
    model, graphs = CASES[case].model(name, tmp_path, small=True), []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # What `generate` does on a GPU by itself.
    compiled = CompileConfig(fullgraph=True, backend=counting, mode=None)
    compiled._compile_all_devices = True
    after_each = []
    for length in (5, 9, 12):
        greedy = {"max_new_tokens": LENGTH - length, "min_new_tokens": LENGTH - length, "do_sample": False}
        tokens = prompt(length, seed=length)
        result = model.generate(tokens, **greedy, cache_implementation="static", compile_config=compiled)
        after_each.append(len(graphs))
        assert torch.equal(result, model.generate(tokens, **greedy))
    assert after_each == [after_each[0]] * 3
    # A cache of a sliding window counts the tokens that it holds in Python, in the base too.
    assert after_each[0] == 1 or name == "gemma3"
