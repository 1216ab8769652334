"""`generate` with a static cache compiles one step in its first call, and nothing later."""

from typing import Any

import pytest
import torch
from models.cases import CASES
from pairs import by_default
from tiny import prompt
from transformers import CompileConfig

MEMORIES = ["headwise", "product-key", "linear", "chunk", "prompt", "ultramem own", "ultramem skip"]
MEMORIES += ["depth default", "depth joint", "depth projected"]
USUAL = [("llama", case) for case in MEMORIES if case not in ("linear", "ultramem own", "depth projected")]
USUAL += [("qwen3", "headwise"), ("gemma3", "headwise"), ("gemma3", "chunk")]
ALL = [(family, case) for family in ("llama", "qwen3", "gemma3") for case in MEMORIES]
LENGTH = 16


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "case"), by_default(USUAL, ALL))
def test_generation_with_a_static_cache_compiles_nothing_after_the_first_call(name, case, tmp_path):
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
        found = model.generate(tokens, **greedy, cache_implementation="static", compile_config=compiled)
        after_each.append(len(graphs))
        assert torch.equal(found, model.generate(tokens, **greedy))
    assert after_each == [after_each[0]] * 3
    # A cache of a sliding window counts the tokens that it holds in Python, in the base too.
    assert after_each[0] == 1 or name == "gemma3"
