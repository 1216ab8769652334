"""`torch.compile(fullgraph=True)` takes a model with memories as one graph, at every site."""

import pytest
import torch
from pairs import by_default
from sites.cases import CASES, give_values
from tiny import prompt

from tests.upscalers.checkpoints import load, save_base
from upscalers.runs.upscale import upscale

SCALES = torch.tensor([0.5, -2.0])


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=by_default(["shared tables", "inside heads", "skip", "inserted"], CASES))
def small_model(request, tmp_path):
    """A model of few layers, to be compiled soon. With eager attention the graph adds in the order that eager does."""
    case = CASES[request.param]
    base = save_base(tmp_path / "base", num_hidden_layers=2 if case.into or case.shares_tables else 1)
    smaller = {"layers": "all"} if case.is_attached else {}
    smaller |= {"span": 1} if case.options.get("span") else {}
    upscale(
        base=base,
        method=case.method,
        output=tmp_path / "out",
        options={**case.options, **smaller},
        num_new_layers=None if case.is_attached else 1,
        verify=False,
    )
    model = give_values(load(tmp_path / "out"))
    model.set_attn_implementation("eager")
    return model


def test_one_graph_gives_the_same_logits_and_gradients(small_model):
    compiled = torch.compile(small_model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, output = (forward(input_ids=prompt(), use_cache=False).logits for forward in (small_model, compiled))
    assert torch.equal(output, expected)
    gradients = []
    for forward in (small_model, compiled):
        small_model.zero_grad()
        forward(input_ids=prompt(), labels=prompt(), use_cache=False, toy_scale=SCALES).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in small_model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")
