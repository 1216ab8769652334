"""Models whose memories draw what they read: checkpointed, compiled, generated with, and twice the same from one seed."""

import pytest
import torch
from models.chapter_models import chapter_model
from models.gradients import enable_checkpointing, loss_and_gradients
from models.ultramem_models import ultramem_model
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import prompt

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.module import MemoryModule


def inserted(memory_type):
    return lambda family, **options: upscaled_model(
        family, memory_type=memory_type, memory_options={"addressing": "random", **options}
    )


MODELS = {
    "midus-hml": inserted("midus-hml"),
    "midus-pkm": inserted("midus-pkm"),
    "linear": inserted("midus-linear"),
    "ultramem": lambda family, **options: ultramem_model(family, dtype=torch.float32, addressing="random", **options),
    "chapters": lambda family, **options: chapter_model(family, dtype=torch.float32, addressing="random", **options),
}


@torch.no_grad()
def logits(model, seed=0):
    torch.manual_seed(seed)
    return model(prompt(), use_cache=False).logits


def of_seed(model, seed=0):
    """Return loss and gradients of a pass."""
    torch.manual_seed(seed)
    return loss_and_gradients(model, prompt())


# Routers with losses refuse reentrant checkpointing, random or not.
CHECKPOINTED = [
    (kind, reentrant) for kind in MODELS for reentrant in (False, True) if (kind, reentrant) != ("chapters", True)
]


@pytest.mark.parametrize(("kind", "use_reentrant"), CHECKPOINTED)
def test_a_layer_that_is_computed_twice_reads_the_same_slots(kind, family, use_reentrant):
    model = MODELS[kind](family).train()
    loss, gradients = of_seed(model)
    enable_checkpointing(model, use_reentrant)
    checkpointed_loss, checkpointed = of_seed(model)
    assert torch.equal(checkpointed_loss, loss) and checkpointed.keys() == gradients.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in gradients.items())
    assert not torch.equal(of_seed(model, seed=1)[0], loss)


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_generated_with_kept_values_and_a_cache(kind, family):
    model = MODELS[kind](family)
    written = []
    for _ in range(2):
        torch.manual_seed(0)
        written.append(model.generate(prompt(8), max_new_tokens=6, do_sample=False))
    assert written[0].shape == (2, 14) and torch.equal(*written)
    with decode_cache(model):
        kept = logits(model)
    torch.testing.assert_close(kept, logits(model), rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(model), logits(model)) and not torch.equal(logits(model), logits(model, seed=1))


def test_batch_norm_learns_statistics_of_content_queries():
    statistics = []
    for addressing in ("content", "random"):
        model = upscaled_model(
            "llama", memory_type="midus-pkm", new_layers=(1,), memory_options={"addressing": addressing}
        ).train()
        model(prompt(), use_cache=False)
        statistics.append(model.model.layers[1].memory.query_mean.clone())
    assert torch.equal(*statistics) and statistics[0].any()


@pytest.mark.parametrize("kind", by_default(["midus-hml", "ultramem", "chapters"], MODELS, fewest=["midus-hml"]))
def test_a_memory_is_one_graph(kind):
    torch._dynamo.reset()
    own_tables = {"share": "none"} if kind == "chapters" else {}
    model, results = MODELS[kind]("llama", **own_tables).train(), []
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
