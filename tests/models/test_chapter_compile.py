"""Models with Mixture of Chapters compile to one graph, and decoding steps to one for all positions."""

import pytest
import torch
from models.chapter_models import chapter_model
from tiny import prompt
from transformers import StaticCache

SMALL = {"config": {"num_hidden_layers": 1}, "layers": (0,)}


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_padded_pass_that_trains_is_one_graph():
    model, mask = chapter_model(routing="chunk", **SMALL).train(), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    labels = prompt(9).masked_fill(torch.arange(9) < 5, -100)
    losses, gradients = [], []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = forward(input_ids=prompt(9), attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_pass_that_is_told_nothing_of_prompts_is_one_graph():
    model = chapter_model(routing="prompt", **SMALL)
    with torch.no_grad(), pytest.warns(UserWarning, match="prompt"):
        expected = model(prompt(9)).logits
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(prompt(9)).logits
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize("routing", ["chunk", "prompt"])
def test_steps_through_a_static_cache_are_one_graph(routing):
    """Eleven steps of a chunk of three: what is kept changes in the graph, and chunks end in it."""
    model, graphs = chapter_model(routing=routing, **SMALL), []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    logits = []
    for forward in (model, torch.compile(model, fullgraph=True, backend=counting)):
        cache, of_steps = StaticCache(model.config, max_cache_len=18), []
        with torch.no_grad():
            model(input_ids=prompt(7), past_key_values=cache)
            for step in range(11):
                positions = torch.full((2, 1), 7 + step)
                tokens = prompt(1, seed=step)
                of_steps.append(forward(input_ids=tokens, past_key_values=cache, position_ids=positions).logits)
        logits.append(torch.cat(of_steps, dim=1))
    torch.testing.assert_close(logits[1], logits[0])
    assert len(graphs) == 1
