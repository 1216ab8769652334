"""Layouts that checkpoints come in and are written in, and tensors that only some models have."""

import itertools
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from composite import composite_model
from pairs import in_turn
from safetensors.torch import save_file
from tiny import NATIVE_FAMILIES

from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import SMALL_MEMORY, edit_config, save_base, unverified, with_memory, write_tensors
from tests.upscalers.contents import (
    config_of,
    load,
    logits,
    long_prompt,
    read_tensors,
    same_bits,
    same_tensors,
    tensor_files,
)
from tests.upscalers.methods import KINDS
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


def test_shards_have_the_requested_size_and_need_few_files(tmp_path):
    base = save_base(tmp_path / "base", num_hidden_layers=16, max_shard_size="1KB")
    single = unverified(base, tmp_path / "single", num_new_layers=2)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, allowed[1]))
    try:
        for size in ("1B", 30_000):
            output = tmp_path / str(size)
            report = with_memory(base, output, max_shard_size=size, num_new_layers=2, verify=False)
            files, tensors = tensor_files(output), read_tensors(output)
            assert len(files) > (100 if size == "1B" else 1)
            assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors", size
            index = json.loads((output / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values()), size
            assert index["weight_map"].keys() == tensors.keys(), size
            assert report.bytes.written == sum(path.stat().st_size for path in files), size
            assert same_tensors(output, single), size
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert len(tensor_files(base)) > 100
    assert torch.equal(logits(base), logits(single))


def test_single_file_precedes_an_index_and_links_are_read(tmp_path):
    base, linked = save_base(tmp_path / "base", max_shard_size="60KB"), tmp_path / "linked"
    other = {name: tensor + 1 for name, tensor in read_tensors(base).items()}
    save_file(other, base / "model.safetensors", {"format": "pt"})
    linked.mkdir()
    for path in base.iterdir():
        (linked / path.name).symlink_to(path)
    out = unverified(linked, tmp_path / "out")
    assert not any(path.is_symlink() for path in out.iterdir())
    assert torch.equal(logits(base), logits(out))


def store_the_head(base: Path, difference: float | None) -> dict[str, torch.Tensor]:
    """Store the head of a tied checkpoint too, or only it; return the tensors as they are then."""
    tensors = read_tensors(base)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = tensors[embedding].clone() if difference is not None else tensors.pop(embedding)
    head[-1, -1] += difference or 0  # what differs comes last
    tensors["language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"] = head
    write_tensors(base, tensors)
    return tensors


@pytest.mark.parametrize(("base_of", "method", "difference"), [
    ("model.", "midus-hml", 1),
    ("", "midus-hml", 1),
    ("model.", "midus-hml", 0),
    ("model.", "midus-hml", None),
    ("", "llama-pro", None),
    ("granite", "llama-pro", None),
])  # fmt: skip
def test_stored_tied_head_counts_once(tmp_path, base_of, method, difference):
    base, out = tmp_path / "base", tmp_path / "out"
    if base_of == "granite":
        tiny_model("granite", tie_word_embeddings=True, vocab_size=128).save_pretrained(base)
    else:
        save_base(base, tie_word_embeddings=True, prefix=base_of)
    expected, head = logits(base), store_the_head(base, difference)["lm_head.weight"]
    assert torch.equal(logits(base), expected) == (difference != 1)
    report = with_memory(base, out, method=method, options=SMALL_MEMORY if method == "midus-hml" else {})
    assert report.identity.max_abs_diff == 0
    assert torch.equal(logits(out), logits(base))
    made, model = read_tensors(out), load(out)
    total = sum(tensor.numel() for tensor in model.parameters())
    assert torch.equal(made["lm_head.weight"], head)
    assert torch.equal(model.lm_head.weight, head)
    assert any("embed_tokens" in name for name in made) == (difference is not None)
    assert report.parameters.base == sum(tensor.numel() for tensor in load(base).parameters())
    assert report.parameters.total == inspect_checkpoint(out)["parameters"]["total"] == total
    assert f"{total:,}" in (out / "README.md").read_text()
    with_memory(out, tmp_path / "again", method="llama-pro", options={}, placement=[1])
    assert strip(tmp_path / "again", tmp_path / "once")["base_confirmed"] is True
    assert strip(tmp_path / "once", tmp_path / "stripped")["base_confirmed"] is True
    assert same_tensors(tmp_path / "stripped", base)
    write_tensors(out, {**made, "lm_head.weight": head + 1})
    assert strip(out, tmp_path / "trained")["differing_tensors"] == 1


@pytest.mark.parametrize(("dtype", "value", "message", "verify"), [
    ("float16", 70000.0, "holds 7e.04, which float16 cannot; expected at most 65504. Use a wider --dtype", True),
    ("bfloat16", 3.4e38, r"holds 3.4e\+38, which bfloat16 cannot; expected at most 3.38953e\+38", False),
])  # fmt: skip
def test_value_beyond_the_dtype_is_refused(tmp_path, dtype, value, message, verify):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.norm.weight"][3] = value
    write_tensors(base, tensors)
    with pytest.raises(ValueError, match=f"model.norm.weight {message}"):
        with_memory(base, tmp_path / "out", dtype=dtype, verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_mixed_dtypes_are_kept(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    tensors = read_tensors(base)
    mixed = {n: t.float() if "norm" in n else t.half() if "lm_head" in n else t for n, t in tensors.items()}
    write_tensors(base, mixed)
    with_memory(base, tmp_path / "out", placement="1,5")
    new, block = read_tensors(tmp_path / "out"), "model.layers.5"
    assert same_bits(new["model.layers.4.input_layernorm.weight"], mixed["model.layers.3.input_layernorm.weight"])
    kept = {"lm_head.weight": torch.float16, f"{block}.input_layernorm.weight": torch.float32}
    assert {name: new[name].dtype for name in kept} == kept
    assert new[f"{block}.memory.row_keys"].dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(base, dtype), logits(tmp_path / "out", dtype))


def test_seed_and_layer_change_only_memories(base, tmp_path):
    first, other = (read_tensors(unverified(base, tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert changed == {n for n in first if ".memory." in n and not n.endswith("value_bank")}
    pairs = [(name, name.replace("layers.1.", "layers.4.")) for name in changed if "layers.1." in name]
    assert pairs
    assert not any(torch.equal(first[name], first[other]) for name, other in pairs)
    assert not any(tensor.any() for name, tensor in first.items() if name.endswith("value_bank"))


def test_only_a_tied_head_replaces_the_embedding(tmp_path):
    base = tmp_path / "base"
    composite_model("gemma3", tie_word_embeddings=True).save_pretrained(base)
    store_the_head(base, None)
    with_memory(base, tmp_path / "out", method="llama-pro", options={})
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)
    plain = save_base(tmp_path / "plain", tie_word_embeddings=True)
    store_the_head(plain, None)
    edit_config(plain, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks 1 tensors that its config requires, model\.embed_tokens\.weight"):
        with_memory(plain, tmp_path / "none")


TYPE = "gemma4_text"
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 3
# Layers 3 and 5 give their keys and values to the three layers at the end.
SHARED = {"num_hidden_layers": 9, "layer_types": LAYERS, "num_kv_shared_layers": 4, "global_head_dim": 16}
EMBEDDING, PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"


@pytest.fixture
def gemma4(tmp_path):
    """Save a tiny Gemma 4 with embeddings and scalars per layer, and four layers that share keys."""
    model = tiny_model(TYPE, **SHARED)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(1 + index / 8)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


AFTER_SHARED = [("midus-hml", "5", ""), ("llama-pro", "5", "store_full_length_kv"), ("llama-pro", "7", "another kind")]


@pytest.mark.parametrize(("method", "placement", "message"), AFTER_SHARED)
def test_placement_after_shared_keys_is_refused(method, placement, message, gemma4, tmp_path):
    remedy = "Choose a --placement of new layers before base layer 2, .*, or a method that adds no layer"
    with pytest.raises(ValueError, match=f"{message}.*{remedy}"):
        upscale(base=gemma4, method=method, output=tmp_path / "made", placement=placement)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("method", ["llama-pro", "llama-pro 4", "avg-deus", "midus-linear"])
def test_blocks_of_embeddings_follow_their_layers(method, gemma4, tmp_path):
    made, stripped = tmp_path / "made", tmp_path / "stripped"
    method, *placement = method.split()
    upscale(base=gemma4, method=method, output=made, placement=placement[0] if placement else None)
    sources = [row.get("base", row.get("sources", [0])[0]) for row in config_of(made)["upscale"]["plan"]]
    old, new = read_tensors(gemma4), read_tensors(made)
    for name, dim in ((EMBEDDING, 1), (PROJECTION, 0)):
        before, after = old[name].chunk(9, dim), new[name].chunk(len(sources), dim)
        assert all(same_bits(after[index], before[source]) for index, source in enumerate(sources)), dim
    assert config_of(made)["num_kv_shared_layers"] == 4
    assert strip(made, stripped)["base_confirmed"]
    assert (stripped / "model.safetensors").read_bytes() == (gemma4 / "model.safetensors").read_bytes()


def test_llama_pro_equals_the_base_with_layer_scalars(gemma4, tmp_path):
    upscale(base=gemma4, method="llama-pro", output=tmp_path / "made")
    expected, model, tokens = load(gemma4), load(tmp_path / "made"), long_prompt()
    new = model.model.layers[2]
    assert new.layer_scalar.item() == 1
    assert not new.post_per_layer_input_norm.weight.any()
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    assert torch.equal(*(each.generate(tokens, attention_mask=mask, max_new_tokens=8) for each in (model, expected)))
    model(tokens, labels=tokens).loss.backward()
    assert new.post_per_layer_input_norm.weight.grad.any()


# Layers of full attention have wider heads and take keys for values; from ten layers on, saved numbers of layers are padded ("02").
KINDS_OF_HEADS = {"num_hidden_layers": 12, "layer_types": LAYERS + LAYERS[:3], "head_dim": 12, "global_head_dim": 24}
KINDS_OF_HEADS |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def test_memory_block_has_the_heads_of_its_layer(tmp_path):
    base, made, stripped = (tmp_path / name for name in ("base", "made", "stripped"))
    tiny_model(TYPE, **KINDS_OF_HEADS).save_pretrained(base)
    report = upscale(base=base, method="midus-hml", output=made, placement="1,12", options={"n": 8, "k": 3})
    assert report.identity.max_abs_diff == 0
    model = load(made)
    blocks = [model.model.layers[index] for index in (1, 12)]
    assert [block.self_attn.head_dim for block in blocks] == [block.memory.head_dim for block in blocks] == [12, 24]
    assert torch.equal(*(logits(folder, input_ids=long_prompt()) for folder in (made, base)))
    model(long_prompt(), labels=long_prompt()).loss.backward()
    assert all(block.memory.value_bank.grad.any() for block in blocks)
    assert strip(made, stripped)["base_confirmed"]
    assert (stripped / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


NUM_LAYERS = 4
PREDICTING = ("enorm.weight", "shared_head.head.weight", "mlp.experts.3.up_proj.weight")


@pytest.fixture(scope="module")
def glm4(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("glm4_moe", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    edit_config(folder, num_nextn_predict_layers=1)
    tensors = {f"model.layers.{NUM_LAYERS}.{name}": torch.full((2, 3), float(i)) for i, name in enumerate(PREDICTING)}
    write_tensors(folder, read_tensors(folder) | tensors)
    return folder


@pytest.mark.parametrize("method", ["moc", "solar", "llama-pro", "midus-hml"])
def test_predicting_layers_stay_after_the_last(method, glm4, tmp_path):
    report = upscale(base=glm4, output=tmp_path / "out", **KINDS[method])
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
    with pytest.raises(ValueError, match=f"{name}, but config.json has num_hidden_layers = {NUM_LAYERS} and num_"):
        upscale(base=folder, method="llama-pro", output=tmp_path / "out")


EXTRA = "model.extra.layers.1.weight"


def expert(layer: int, number: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.w1.weight"


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory) -> Path:
    """A tiny Llama whose layers also hold experts; no two tensors are alike."""
    base = save_base(tmp_path_factory.mktemp("experts") / "base")
    experts = {expert(i, n): torch.full((2, 3), 10.0 * i + n) for i, n in itertools.product(range(4), range(4))}
    write_tensors(base, {**read_tensors(base), **experts, EXTRA: torch.full((2,), 99.0)})
    return base


MOVED = {
    "solar": {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 3}, "llama-pro": {0: 0, 1: 1, 3: 2, 4: 3}, "opt-deus": {0: 0, 1: 1, 3: 2, 5: 3},
}  # fmt: skip


@pytest.mark.parametrize("method", MOVED)
def test_unknown_layer_tensors_move_with_a_warning(method, with_experts, tmp_path, command):
    outcome = command("--base", with_experts, "--method", method, "--output", tmp_path / "out", "--no-verify")
    message = "upscale: warning: the base holds 17 tensors that its architecture does not have; they are copied."
    assert outcome.status == 0
    assert outcome.err.startswith(message)
    old, new = read_tensors(with_experts), read_tensors(tmp_path / "out")
    moved = {expert(layer, n): expert(source, n) for layer, source in MOVED[method].items() for n in range(4)}
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
