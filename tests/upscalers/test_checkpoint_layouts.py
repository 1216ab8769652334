"""Every layout that a checkpoint comes in, and every layout that it can be written in."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from composite import composite_model
from safetensors.torch import save_file

from scripts.anatomy.tiny import tiny_model as tiny_type
from tests.upscalers.checkpoints import (
    SMALL_MEMORY,
    edit_config,
    load,
    logits,
    read_tensors,
    same_bits,
    same_tensors,
    save_base,
    tensor_files,
    unverified,
    with_memory,
    write_tensors,
)
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip


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
            assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
            index = json.loads((output / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
            assert index["weight_map"].keys() == tensors.keys()
            assert report.bytes.written == sum(path.stat().st_size for path in files)
            assert same_tensors(output, single)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert len(tensor_files(base)) > 100 and torch.equal(logits(base), logits(single))


def test_single_file_precedes_an_index_and_links_are_read(tmp_path):
    base, linked = save_base(tmp_path / "base", max_shard_size="60KB"), tmp_path / "linked"
    other = {name: tensor + 1 for name, tensor in read_tensors(base).items()}
    save_file(other, base / "model.safetensors", {"format": "pt"})
    linked.mkdir()
    for path in base.iterdir():
        (linked / path.name).symlink_to(path)
    with_memory(linked, tmp_path / "out", verify=False)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert torch.equal(logits(base), logits(tmp_path / "out"))


def store_the_head(base: Path, difference: float | None) -> dict[str, torch.Tensor]:
    """Store the head of a tied checkpoint too, or alone, as removal of duplicates may; return the tensors as they are then."""
    tensors = read_tensors(base)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = tensors[embedding].clone() if difference is not None else tensors.pop(embedding)
    head[-1, -1] += difference or 0  # what differs comes last
    tensors["language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"] = head
    write_tensors(base, tensors)
    return tensors


@pytest.mark.parametrize(
    ("base_of", "method", "difference"),
    [
        ("model.", "midus-hml", 1), ("", "midus-hml", 1), ("model.", "midus-hml", 0), ("model.", "midus-hml", None),
        ("", "llama-pro", None), ("granite", "llama-pro", None),
    ],
)  # fmt: skip
def test_stored_tied_head_counts_once(tmp_path, base_of, method, difference):
    base, out = tmp_path / "base", tmp_path / "out"
    if base_of == "granite":
        tiny_type("granite", tie_word_embeddings=True, vocab_size=128).save_pretrained(base)
    else:
        save_base(base, tie_word_embeddings=True, prefix=base_of)
    expected = logits(base)
    head = store_the_head(base, difference)["lm_head.weight"]
    assert torch.equal(logits(base), expected) == (difference != 1)
    report = with_memory(base, out, method=method, options=SMALL_MEMORY if method == "midus-hml" else {})
    assert report.identity.max_abs_diff == 0 and torch.equal(logits(out), logits(base))
    made, model = read_tensors(out), load(out)
    total = sum(tensor.numel() for tensor in model.parameters())
    assert torch.equal(made["lm_head.weight"], head) and torch.equal(model.lm_head.weight, head)
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


@pytest.mark.parametrize(
    ("dtype", "value", "message", "verify"),
    [
        ("float16", 70000.0, "holds 7e.04, which float16 cannot; expected at most 65504. Use a wider --dtype", True),
        ("bfloat16", 3.4e38, r"holds 3.4e\+38, which bfloat16 cannot; expected at most 3.38953e\+38", False),
    ],
)
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
    assert {name: new[name].dtype for name in kept} == kept and new[f"{block}.memory.row_keys"].dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(base, dtype), logits(tmp_path / "out", dtype))


def test_seed_and_layer_change_only_memories(base, tmp_path):
    first, other = (read_tensors(unverified(base, tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert changed == {n for n in first if ".memory." in n and not n.endswith("value_bank")}
    assert all(
        not torch.equal(first[n], first[n.replace("layers.1.", "layers.4.")]) for n in changed if "layers.1." in n
    )
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
