"""`torch.compile(fullgraph=True)` takes a whole model as one graph; exports."""

import itertools
import os

import pytest
import torch
from models.cases import CASES, INSERTED
from models.gradients import check_close, loss_and_gradients
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import logits, prompt
from transformers import CompileConfig, StaticCache

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.ops import op_choices

LENGTH = 16


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counting():
    """A backend that keeps the graphs that it is given, and runs them as they are."""

    def backend(graph, _):
        backend.graphs.append(graph)
        return graph.forward

    backend.graphs = []
    return backend


def test_cached_step_is_one_graph_with_one_call_of_the_op(counting):
    model, found = upscaled_model("llama", num_hidden_layers=2, new_layers=(1,)), []
    model.set_attn_implementation("eager")
    for forward in (model, torch.compile(model, fullgraph=True, backend=counting)):
        cache = StaticCache(model.config, max_cache_len=26)
        with torch.no_grad(), decode_cache(model):
            model(input_ids=prompt(), **{CACHE: cache}, use_cache=True)
            found.append(forward(input_ids=prompt(1), **{CACHE: cache}, use_cache=True).logits)
    assert torch.equal(*found)
    assert len(counting.graphs) == 1
    called = [str(node.target) for node in counting.graphs[0].graph.nodes if node.op.startswith("call")]
    # With a transform, what C computes on a CPU is an op of its own.
    assert sum(name.startswith("midus_hf.headwise_lookup") for name in called) == 1


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="inductor does not support ATEN_CPU_CAPABILITY=default on every processor",
)
def test_inductor_compiles_a_memory_for_training():
    memory = upscaled_model("llama", num_hidden_layers=1, new_layers=(0,)).model.layers[0].memory
    given, upstream = torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for run in (memory, torch.compile(memory, fullgraph=True)):
        output = run(given)
        results.append([output.detach(), *torch.autograd.grad(output, list(memory.parameters()), upstream)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)  # fused kernels add in another order


MEMORIES = ["midus-hml", "midus-pkm", "linear", "chunk", "ultramem own", "ultramem skip"]
MEMORIES += ["depth default", "depth joint", "depth projected"]
USUAL = [("llama", case) for case in ("chunk", "ultramem skip", "depth default")] + [("gemma3", "midus-pkm")]
FEWEST = [("llama", "chunk"), ("gemma3", "midus-pkm")]
ALL = list(itertools.product(("llama", "qwen3", "gemma3"), MEMORIES))


@pytest.mark.parametrize(("name", "case"), by_default(USUAL, ALL, fewest=FEWEST))
def test_static_cache_generation_compiles_once(name, case, tmp_path, counting):
    model, after_each = CASES[case].model(name, tmp_path, small=True), []
    # What `generate` does on a GPU by itself.
    compiled = CompileConfig(fullgraph=True, backend=counting, mode=None)
    compiled._compile_all_devices = True
    for length in (5, 9, 12):
        greedy = {"max_new_tokens": LENGTH - length, "min_new_tokens": LENGTH - length, "do_sample": False}
        tokens = prompt(length, seed=length)
        result = model.generate(tokens, **greedy, cache_implementation="static", compile_config=compiled)
        after_each.append(len(counting.graphs))
        assert torch.equal(result, model.generate(tokens, **greedy)), length
    assert after_each == [after_each[0]] * 3
    # A cache of a sliding window counts the tokens that it holds in Python, in the base too.
    assert after_each[0] == 1 or name == "gemma3"


def test_padding_mask_of_a_step_has_one_stride(shared_model):
    """Compiled decoding would be compiled again for each token, if the strides of an argument grew."""
    prepared, ones = shared_model("chunk").prepare_inputs_for_generation, torch.ones(1, 7, dtype=torch.long)
    masks = (prepared(prompt()[:1, :1], attention_mask=ones[:, :end])["token_mask"] for end in (5, 6, 7))
    assert {(mask.shape, mask.stride()) for mask in masks} == {((1, 1), (1, 1))}


# Single memories, which AOTAutograd traces too, are in test_training.py.
TRAINED = [("llama", "chunk", "eager"), ("llama", "all fetched", "eager"), ("llama", "depth default", "aot_eager")]
# With the oldest versions, which generate with fewer graphs.
ALSO_TRAINED = [*TRAINED, ("llama", "ultramem skip", "eager")]
TRAINED_CASES = ["midus-hml", "midus-pkm", "chunk", "all fetched", "hier-kv"]
TRAINED_CASES += ["ultramem heads", "ultramem skip", "depth default", "depth reused"]
ALL_TRAINED = [*itertools.product(("llama", "gemma3"), TRAINED_CASES, ("eager", "aot_eager"))]
ALL_TRAINED += [("llama", "midus-hml", "inductor")]


def small_model(case, name, folder):
    model = CASES[case].model(name, folder, torch.float32, small=True)
    model.set_attn_implementation("eager")  # whose graph adds in the order that it does
    return model


@pytest.mark.parametrize(("name", "case", "backend"), by_default(TRAINED, ALL_TRAINED, fewest=ALSO_TRAINED))
def test_training_compiles_as_one_graph(name, case, backend, tmp_path):
    model, tokens = small_model(case, name, tmp_path).train(), prompt(9)
    arguments = CASES[case].of_training(tokens)
    if CASES[case].fetches:
        train_blocks(model.banks)
    loss, expected = loss_and_gradients(model, tokens, **arguments)
    if CASES[case].fetches:  # what is fetched within a pass is no part of a graph
        arguments = {"labels": tokens, "memory_blocks": model.fetch_memory(arguments["memory_ids"])}
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found_loss, actual = loss_and_gradients(model, tokens, compiled, **arguments)
    far = 1e-3 if backend == "inductor" else 0 if case in INSERTED else 1e-4  # kernels add in another order
    torch.testing.assert_close(found_loss, loss, rtol=far and 1e-5, atol=0)
    check_close(actual, expected, far)


def test_graph_reads_the_blocks_that_each_pass_is_given(tmp_path):
    """Also ids, where the fetching is no part of a graph."""
    model, tokens = small_model("all fetched", "llama", tmp_path), prompt(9)
    ids = CASES["all fetched"].given()["memory_ids"]
    compiled, around = torch.compile(model, fullgraph=True, backend="eager"), torch.compile(model, backend="eager")
    for each in (ids, ids.flip(0)):
        blocks = model.fetch_memory(each)
        expected = logits(model, tokens, memory_blocks=blocks)
        torch.testing.assert_close(logits(compiled, tokens, memory_blocks=blocks), expected)
        torch.testing.assert_close(logits(around, tokens, memory_ids=each), expected)


class _LogitsOf(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


# docs/serve.md exports head-wise memory.
@pytest.mark.parametrize("case", by_default(["ultramem own"], ("midus-hml", "midus-pkm", "ultramem own")))
def test_exported_graph_takes_any_number_of_tokens(case):
    model, tokens = CASES[case].model("llama", None, torch.float32, small=True), prompt(7)
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with op_choices(backend="reference"):
        graph = torch.export.export(_LogitsOf(model), (tokens,), dynamic_shapes=sizes).module()
        for some in (tokens, prompt(4, 3)):
            assert torch.equal(graph(some), logits(model, some))
