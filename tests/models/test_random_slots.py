"""Models whose memories draw what they read: checkpointed, compiled, generated with, and twice the same from one seed."""

import itertools

import pytest
import torch
from models.gradients import enable_checkpointing, loss_and_gradients
from models.memory_models import chapter_model, ultramem_model
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import logits, prompt

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.module import MemoryModule

KINDS = ("midus-hml", "midus-pkm", "midus-linear", "ultramem", "chapters")


def model_of(kind, family="llama", **options):
    """Return a model whose memories of one kind draw what they read."""
    attached = {"ultramem": ultramem_model, "chapters": chapter_model}
    if kind in attached:
        return attached[kind](family, dtype=torch.float32, addressing="random", **options)
    return upscaled_model(family, memory_type=kind, memory_options={"addressing": "random", **options})


def seeded(call, *arguments, seed=0):
    """Return the result of a call after a seed."""
    torch.manual_seed(seed)
    return call(*arguments)


# Routers with losses refuse reentrant checkpointing, random or not.
CHECKPOINTED = [*itertools.product(KINDS, (False, True))][:-1]


@pytest.mark.parametrize(("kind", "use_reentrant"), CHECKPOINTED)
def test_checkpointed_layer_reads_the_same_slots_again(kind, family, use_reentrant):
    model = model_of(kind, family).train()
    loss, gradients = seeded(loss_and_gradients, model, prompt())
    enable_checkpointing(model, use_reentrant)
    checkpointed_loss, checkpointed = seeded(loss_and_gradients, model, prompt())
    assert torch.equal(checkpointed_loss, loss) and checkpointed.keys() == gradients.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in gradients.items())
    assert not torch.equal(seeded(loss_and_gradients, model, prompt(), seed=1)[0], loss)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_depends_on_the_seed_alone(kind, family):
    model = model_of(kind, family)
    written = [seeded(lambda: model.generate(prompt(8), max_new_tokens=6, do_sample=False)) for _ in range(2)]
    assert written[0].shape == (2, 14) and torch.equal(*written)
    plain = seeded(logits, model)
    with decode_cache(model):
        torch.testing.assert_close(seeded(logits, model), plain, rtol=1e-3, atol=1e-3)
    assert torch.equal(seeded(logits, model), plain) and not torch.equal(seeded(logits, model, seed=1), plain)


def test_batch_norm_learns_statistics_of_content_queries():
    statistics = []
    for addressing in ("content", "random"):
        model = model_of("midus-pkm", addressing=addressing).train()
        model(prompt(), use_cache=False)
        statistics.append(model.model.layers[1].memory.query_mean.clone())
    assert torch.equal(*statistics) and statistics[0].any()


@pytest.mark.parametrize("kind", by_default(["midus-hml", "ultramem", "chapters"], KINDS, fewest=["midus-hml"]))
def test_memory_is_one_graph(kind):
    torch._dynamo.reset()
    own_tables = {"share": "none"} if kind == "chapters" else {}
    model, results = model_of(kind, **own_tables).train(), []
    memory = next(module for module in model.modules() if isinstance(module, MemoryModule))
    states = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for forward in (memory, torch.compile(memory, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        memory.zero_grad()
        output = forward(states)
        output.square().sum().backward()
        learnt = {name: parameter for name, parameter in memory.named_parameters() if parameter.grad is not None}
        assert learnt
        results.append({"output": output, **{name: parameter.grad.clone() for name, parameter in learnt.items()}})
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
