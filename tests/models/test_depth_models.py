"""Models whose heads read the depth compute what hooks on the base do, and nothing but the base while they do not act."""

import pytest
import torch
from models.depth_models import KINDS, depth_model
from models.depth_reference import add_depth
from models.hosting import logits
from tiny import prompt, tiny_model

SEVEN = {"num_hidden_layers": 7}
OTHERS = {
    "the newest of seven layers": {"attention_slots": "projected", "slots": 5} | SEVEN,
    "the newest, released": {"slots": 4, "rope": "released", "attention_slots": "reused", "joining": "joint"} | SEVEN,
    "layers of one kind": {"layers": [1, 3]},
    "the paper's": {"joining": "joint", "attention_slots": "reused", "rope": "released"},
}


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def compare(family, kind="default", **options):
    model, tokens = depth_model(family, kind, **options), prompt()
    layers = {"num_hidden_layers": model.config.num_hidden_layers}
    native = tiny_model(family, torch.float64, **layers, **(options.get("base") or {}))
    plain = logits(native, tokens)
    owned = add_depth(native, model)
    expected = native(tokens, labels=tokens, use_cache=False)
    assert (expected.logits - plain).abs().max() > 1e-2
    expected.loss.backward()
    found = model(tokens, labels=tokens, use_cache=False)
    found.loss.backward()
    # Norms, cosines, and the softmax of eager attention are in float32, whatever the model is in.
    assert distance(found.logits, expected.logits) < 1e-6
    gradients = {name: value.grad for name, value in [*native.named_parameters(), *owned.items()]}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert gradients[name].any(), name
        assert distance(parameter.grad, gradients[name]) < 5e-6, name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_every_gradient_are_those_of_hooks_on_the_base(family, kind):
    compare(family, kind)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "mistral", "olmo2"])
@pytest.mark.parametrize("kind", ["default", "reused", "projected", "released"])
def test_they_are_on_the_other_families_too(family, kind):
    compare(family, kind)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2"])
@pytest.mark.parametrize("kind", OTHERS)
def test_they_are_in_other_models(family, kind):
    compare(family, **OTHERS[kind])


@pytest.mark.parametrize("kind", ["default", "projected", "released"])
def test_they_are_where_the_rotation_makes_keys_longer(kind):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    compare("qwen3", kind, base={"rope_parameters": yarn})
