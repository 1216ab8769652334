"""Models whose heads read the depth compute what hooks on the base do, and nothing but the base where their weights are zero."""

import pytest
import torch
from models.depth_models import KINDS, depth_model, logits
from models.depth_reference import add_depth
from models.optimizer_steps import train_steps
from tiny import prompt, tiny_model
from transformers import AutoModelForCausalLM

SEVEN = {"num_hidden_layers": 7}
LONG = {
    "hybrid of seven layers": {"slots": 6, "keep": "hybrid"} | SEVEN,
    "hybrid of one slot a layer": {"slots": 6, "keep": "hybrid", "attention_slots": "none", "num_hidden_layers": 9},
    "best, released": {"slots": 4, "keep": "best", "rope": "released", "attention_slots": "projected"} | SEVEN,
    "best of some": {"slots": 3, "keep": "best", "layers": [0, 1, 3, 4, 6]} | SEVEN,
    "layers of one kind": {"layers": [1, 3]},
    "the paper's": {"depth_weight": "one", "rope": "released"},
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
@pytest.mark.parametrize("kind", ["default", "projected", "released", "best"])
def test_they_are_on_the_other_families_too(family, kind):
    compare(family, kind)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2"])
@pytest.mark.parametrize("kind", LONG)
def test_they_are_in_deeper_models_that_choose_their_slots(family, kind):
    compare(family, **LONG[kind])


@pytest.mark.parametrize("kind", ["default", "projected", "released"])
def test_they_are_where_the_rotation_makes_keys_longer(kind):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    compare("qwen3", kind, base={"rope_parameters": yarn})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["default", "released", "best"])
def test_weights_of_zero_change_no_bit_whatever_projections_hold(native_family, kind, dtype, attention):
    attention = "eager" if native_family == "gemma2" else attention  # whose scores are capped, which sdpa cannot
    base = tiny_model(native_family, dtype)
    model = depth_model(native_family, kind, dtype, acting=False)
    base.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    tokens = prompt()
    mask = (torch.arange(tokens.shape[1]) >= torch.tensor([[5], [0]])).long()
    for scale in (1, 30):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "ffn_" in name:
                    parameter.mul_(scale)
        assert torch.equal(logits(model, tokens), logits(base, tokens))
        given = {"attention_mask": mask}
        assert torch.equal(logits(model, tokens, **given)[mask == 1], logits(base, tokens, **given)[mask == 1])


def test_weights_that_were_trained_and_set_to_zero_again_change_no_bit_after_loading(native_family, tmp_path):
    model, tokens = depth_model(native_family, dtype=torch.float32, acting=False), prompt()
    expected = logits(tiny_model(native_family), tokens)
    weights = {name: value for name, value in model.named_parameters() if name.endswith("depth_weight")}
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is weight for weight in weights.values()))
    train_steps(model, 2)
    assert any(weight.any() for weight in weights.values())
    moved = logits(model, tokens)
    assert not torch.allclose(moved, expected, atol=1e-3)
    model.save_pretrained(tmp_path / "moved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moved").eval(), tokens), moved)
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
    model.save_pretrained(tmp_path / "zero")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "zero").eval(), tokens), expected)
