"""New layers in Gemma 4: embeddings per layer follow their layers, and layers that share keys and values stay the last ones."""

import re

import pytest
import torch

from midus_hf.models.inference.tiny import tiny_model
from tests.upscalers.checkpoints import config_of, load, read_tensors, same_bits
from upscalers.request.errors import RequestError
from upscalers.runs.base_confirmation import keeps_base
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

TYPE = "gemma4_text"
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 3
# Layers 3 and 5 give their keys and values to the three layers at the end.
SHARED = {"num_hidden_layers": 9, "layer_types": LAYERS, "num_kv_shared_layers": 4, "global_head_dim": 16}
EMBEDDING, PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"


@pytest.fixture
def base(tmp_path):
    """Save a tiny Gemma 4 with embeddings per layer and four layers that share keys and values; layers have scalars."""
    model = tiny_model(TYPE, **SHARED)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(1 + index / 8)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(("method", "site"), [("midus-hml", "inserted"), ("moda", "inside-attention")])
def test_a_method_that_does_not_take_the_type_names_those_that_do(method, site, base, tmp_path):
    with pytest.raises(RequestError) as refused:
        upscale(base=base, method=method, output=tmp_path / "made")
    assert re.match(f"model_type '{TYPE}' takes no memory of type '.*' at the site '{site}' ", str(refused.value))
    remedy = "Choose one of hier-ffn, hier-kv, hier-lora-ffn, hier-lora-qk, hier-lora-vo, moc, ultramem-v2 (docs/families.md)."
    assert str(refused.value).endswith(remedy)


def tokens() -> torch.Tensor:
    """Return token ids `[2, 20]`, longer than the sliding windows."""
    return torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("method", "placement"), [("llama-pro", None), ("llama-pro", "4"), ("attenuated-copy", None), ("avg-deus", None)]
)
def test_blocks_of_the_embeddings_follow_their_layers_and_strip_gives_the_base_back(method, placement, base, tmp_path):
    made, stripped = tmp_path / "made", tmp_path / "stripped"
    upscale(base=base, method=method, output=made, placement=placement)
    plan = config_of(made)["upscale"]["plan"]
    sources = [row["base"] if "base" in row else row["sources"][0] for row in plan]
    old, new = read_tensors(base), read_tensors(made)
    for name, dim in ((EMBEDDING, 1), (PROJECTION, 0)):
        before, after = old[name].chunk(9, dim), new[name].chunk(len(sources), dim)
        assert all(same_bits(after[index], before[source]) for index, source in enumerate(sources))
    assert config_of(made)["num_kv_shared_layers"] == 4
    assert keeps_base(made)
    strip(made, stripped)
    assert (stripped / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_llama_pro_computes_what_the_base_computes_whatever_the_scalars_of_layers_are(base, tmp_path):
    upscale(base=base, method="llama-pro", output=tmp_path / "made")
    expected, model = load(base), load(tmp_path / "made")
    new = model.model.layers[2]
    assert new.layer_scalar.item() == 1 and not new.post_per_layer_input_norm.weight.any()
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, expected(tokens()).logits)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    generated = [each.generate(tokens(), attention_mask=mask, max_new_tokens=8) for each in (model, expected)]
    assert torch.equal(*generated)
    model(tokens(), labels=tokens()).loss.backward()
    assert new.post_per_layer_input_norm.weight.grad.any()


@pytest.mark.parametrize(
    ("placement", "message"), [("5", "store_full_length_kv"), ("7", "another kind than its source")]
)
def test_a_new_layer_behind_a_layer_that_gives_keys_and_values_is_refused(placement, message, base, tmp_path):
    with pytest.raises(RequestError, match=message) as refused:
        upscale(base=base, method="llama-pro", output=tmp_path / "made", placement=placement)
    assert str(refused.value).endswith(
        "Choose a --placement of new layers in front of base layer 2, which gives its keys and values to later layers, or a method "
        "that adds no layer."
    )
    assert not (tmp_path / "made").exists()
