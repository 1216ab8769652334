"""Tensors that only some models have: embeddings per layer, shared keys and values, further predicted tokens, unknown ones."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from pairs import in_turn
from tiny import NATIVE_FAMILIES

from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import (
    config_of,
    edit_config,
    load,
    logits,
    long_prompt,
    read_tensors,
    same_bits,
    same_tensors,
    save_base,
    write_tensors,
)
from tests.upscalers.methods import KINDS, SMALL_CHAPTERS
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

TYPE = "gemma4_text"
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 3
# Layers 3 and 5 give their keys and values to the three layers at the end.
SHARED = {"num_hidden_layers": 9, "layer_types": LAYERS, "num_kv_shared_layers": 4, "global_head_dim": 16}
EMBEDDING, PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"


@pytest.fixture
def gemma4(tmp_path):
    """Save a tiny Gemma 4 with embeddings per layer and four layers that share keys and values; layers have scalars."""
    model = tiny_model(TYPE, **SHARED)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(1 + index / 8)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("method", "placement", "message"),
    [
        ("midus-hml", "5", ""),
        ("llama-pro", "5", "store_full_length_kv"),
        ("llama-pro", "7", "another kind than its source"),
    ],
)
def test_placement_after_shared_keys_is_refused(method, placement, message, gemma4, tmp_path):
    remedy = "Choose a --placement of new layers before base layer 2, .*, or a method that adds no layer"
    with pytest.raises(ValueError, match=f"{message}.*{remedy}"):
        upscale(base=gemma4, method=method, output=tmp_path / "made", placement=placement)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("method", "placement"), [("llama-pro", None), ("llama-pro", "4"), ("avg-deus", None), ("midus-linear", None)]
)
def test_blocks_of_embeddings_follow_their_layers(method, placement, gemma4, tmp_path):
    made, stripped = tmp_path / "made", tmp_path / "stripped"
    upscale(base=gemma4, method=method, output=made, placement=placement)
    plan = config_of(made)["upscale"]["plan"]
    sources = [row["base"] if "base" in row else row["sources"][0] for row in plan]
    old, new = read_tensors(gemma4), read_tensors(made)
    for name, dim in ((EMBEDDING, 1), (PROJECTION, 0)):
        before, after = old[name].chunk(9, dim), new[name].chunk(len(sources), dim)
        assert all(same_bits(after[index], before[source]) for index, source in enumerate(sources))
    assert config_of(made)["num_kv_shared_layers"] == 4
    assert strip(made, stripped)["base_confirmed"]
    assert (stripped / "model.safetensors").read_bytes() == (gemma4 / "model.safetensors").read_bytes()


def test_llama_pro_equals_the_base_with_layer_scalars(gemma4, tmp_path):
    upscale(base=gemma4, method="llama-pro", output=tmp_path / "made")
    expected, model = load(gemma4), load(tmp_path / "made")
    new = model.model.layers[2]
    assert new.layer_scalar.item() == 1 and not new.post_per_layer_input_norm.weight.any()
    with torch.no_grad():
        assert torch.equal(model(long_prompt()).logits, expected(long_prompt()).logits)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    generated = [each.generate(long_prompt(), attention_mask=mask, max_new_tokens=8) for each in (model, expected)]
    assert torch.equal(*generated)
    model(long_prompt(), labels=long_prompt()).loss.backward()
    assert new.post_per_layer_input_norm.weight.grad.any()


# Layers of full attention have wider heads and take keys for values; from ten layers on, saved numbers of layers are padded ("02").
KINDS_OF_HEADS = {"num_hidden_layers": 12, "layer_types": LAYERS + LAYERS[:3], "head_dim": 12, "global_head_dim": 24}
KINDS_OF_HEADS |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def test_memory_block_has_the_heads_of_its_layer(tmp_path):
    base, made, stripped = (tmp_path / name for name in ("base", "made", "stripped"))
    tiny_model(TYPE, **KINDS_OF_HEADS).save_pretrained(base)
    report = upscale(base=base, method="midus-hml", output=made, placement="1,12", options={"n": 8, "k": 3})
    assert report.identity.max_abs_diff == 0
    expected, model = load(base), load(made)
    blocks = [model.model.layers[index] for index in (1, 12)]
    assert [block.self_attn.head_dim for block in blocks] == [12, 24]
    assert [block.memory.head_dim for block in blocks] == [12, 24]
    with torch.no_grad():
        assert torch.equal(model(long_prompt()).logits, expected(long_prompt()).logits)
    model(long_prompt(), labels=long_prompt()).loss.backward()
    assert all(block.memory.value_bank.grad.any() for block in blocks)
    assert strip(made, stripped)["base_confirmed"]
    assert (stripped / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


NUM_LAYERS = 4
PREDICTING = ("enorm.weight", "shared_head.head.weight", "mlp.experts.3.up_proj.weight")


@pytest.fixture(scope="module")
def glm4(tmp_path_factory) -> Path:
    """Return the folder of a tiny GLM-4.5 with one layer that predicts a further token."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("glm4_moe", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    edit_config(folder, num_nextn_predict_layers=1)
    tensors = {f"model.layers.{NUM_LAYERS}.{name}": torch.full((2, 3), float(i)) for i, name in enumerate(PREDICTING)}
    write_tensors(folder, read_tensors(folder) | tensors)
    return folder


@pytest.mark.parametrize(
    ("method", "options"), [("moc", SMALL_CHAPTERS), ("solar", {}), ("llama-pro", {}), ("midus-hml", {"n": 8, "k": 3})]
)
def test_predicting_layers_stay_after_the_last(method, options, glm4, tmp_path):
    report = upscale(base=glm4, method=method, output=tmp_path / "out", options=options)
    before, after = read_tensors(glm4), read_tensors(tmp_path / "out")
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    for name in PREDICTING:
        moved = after[f"model.layers.{report.num_layers}.{name}"]
        assert same_bits(moved, before[f"model.layers.{NUM_LAYERS}.{name}"])
    if method == "solar":  # computes something else than the base
        return
    assert torch.equal(*(logits(folder, input_ids=long_prompt()) for folder in (tmp_path / "out", glm4)))
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", glm4)


def test_uncounted_layer_is_refused(glm4, tmp_path):
    folder, name = shutil.copytree(glm4, tmp_path / "base"), f"layers.{NUM_LAYERS + 1}.enorm.weight"
    write_tensors(folder, {**read_tensors(folder), f"model.{name}": torch.zeros(2)})
    with pytest.raises(
        ValueError, match=f"{name}, but config.json has num_hidden_layers = {NUM_LAYERS} and num_nextn_"
    ):
        upscale(base=folder, method="llama-pro", output=tmp_path / "out")


EXTRA = "model.extra.layers.1.weight"


def expert(layer: int, number: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.w1.weight"


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory) -> Path:
    """A tiny Llama whose layers also hold experts, as a mixture of experts names them; no two tensors are alike."""
    base = save_base(tmp_path_factory.mktemp("experts") / "base")
    experts = {expert(i, n): torch.full((2, 3), 10.0 * i + n) for i, n in itertools.product(range(4), range(4))}
    write_tensors(base, {**read_tensors(base), **experts, EXTRA: torch.full((2,), 99.0)})
    return base


@pytest.mark.parametrize(
    ("method", "sources"),
    [
        ("solar", {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 3}),
        ("llama-pro", {0: 0, 1: 1, 3: 2, 4: 3}),
        ("opt-deus", {0: 0, 1: 1, 3: 2, 5: 3}),
    ],
)
def test_unknown_layer_tensors_move_with_a_warning(method, sources, with_experts, tmp_path, command):
    words = ("--base", with_experts, "--method", method, "--output", tmp_path / "out", "--no-verify")
    outcome = command(*words)
    message = "the base holds 17 tensors that its architecture does not have; they are copied."
    assert outcome.status == 0 and outcome.err.startswith(f"upscale: warning: {message}\n")
    old, new = read_tensors(with_experts), read_tensors(tmp_path / "out")
    moved = {expert(layer, number): expert(source, number) for layer, source in sources.items() for number in range(4)}
    assert {name for name in new if ".experts." in name} == moved.keys()
    assert all(same_bits(new[name], old[source]) for name, source in {**moved, EXTRA: EXTRA}.items())
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", with_experts)


# Of each way to make new tensors one.
METHODS = ["llama-pro", "opt-deus", "lesa", "midus-hml", "moc", "ultramem-v2", "hier-ffn"]


@pytest.mark.parametrize(("method", "family"), in_turn(METHODS, NATIVE_FAMILIES))
def test_names_without_a_prefix_are_kept(method, family, shared_base, tmp_path):
    bases = {"out": save_base(tmp_path / "base", family, prefix=""), "usual": shared_base(family)}
    for name, base in bases.items():
        upscale(base=base, output=tmp_path / name, verify=False, **KINDS[method])
    result, usual = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "usual")
    assert result.keys() == {name.removeprefix("model.") for name in usual}
    for name, tensor in usual.items():  # what starts at random does so by its whole name
        other = result[name.removeprefix("model.")]
        assert other.shape == tensor.shape if ".memor" in name else same_bits(other, tensor)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "usual"))
