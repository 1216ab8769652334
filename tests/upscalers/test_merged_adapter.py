"""A LoRA is merged into the base while the base is read: the same bits as PEFT's merging gives."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import by_default, in_turn
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt

from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import (
    load,
    logits,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    save_base,
    with_memory,
    write_tensors,
)
from tests.upscalers.hub_server import Repository, files_of
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 6, "target_modules": ALL_LINEAR},
    "rslora": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 7},
        "alpha_pattern": {"down_proj": 3, "^model.layers.2.mlp.up_proj": 1},
    },
    "some layers": {"r": 2, "lora_alpha": 2, "target_modules": ["mlp.up_proj"], "layers_to_transform": [1, 3]},
    "embedding": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "q_proj"], "fan_in_fan_out": True},
}


def save_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Save a LoRA for a base whose matrices are all random."""
    model = get_peft_model(load(base), LoraConfig(**{**ADAPTERS["plain"], **config}))
    draw = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw).mul_(0.1).to(dtype)
        elif "modules_to_save" in name:
            parameter.data += 1
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(load(base), adapter).merge_and_unload().eval()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize(("kind", "dtype"), in_turn(ADAPTERS, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("family", by_default(["llama"], ["llama", "gemma3", "qwen2"]))
def test_the_result_is_that_of_the_base_that_peft_merges(tmp_path, kind, dtype, family):
    base = save_base(tmp_path / "base", family, dtype, tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "adapter", dtype, **ADAPTERS[kind])
    merged = merged_by_peft(base, adapter)
    report = with_memory(base, tmp_path / "out", adapter=adapter)
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    with torch.no_grad():
        expected = merged(prompt()).logits
    assert torch.equal(logits(tmp_path / "out"), expected) and not torch.equal(expected, logits(base))
    strip(tmp_path / "out", tmp_path / "stripped")
    stripped, wanted = read_tensors(tmp_path / "stripped"), weights(merged)
    assert stripped.keys() == wanted.keys()
    assert all(same_bits(stripped[name], wanted[name]) for name in wanted)


def test_methods_compute_with_merged_weights_and_the_record_names_the_adapter(tmp_path):
    base = save_base(tmp_path / "base", "llama", torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "adapter")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "merged")
    upscale(base=tmp_path / "merged", method="opt-deus", output=tmp_path / "expected", verify=False)
    upscale(base=base, adapter=adapter, method="opt-deus", output=tmp_path / "out", verify=False)
    assert same_tensors(tmp_path / "out", tmp_path / "expected")
    record = record_of(tmp_path / "out")["base"]
    digest = hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert record["adapter"] == {"name": "adapter", "sha256": digest}
    assert record["tensor_sha256"] == record_of(tmp_path / "expected")["base"]["tensor_sha256"]
    assert "adapter: adapter" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_beside_the_base_is_merged_on_request(tmp_path):
    base = save_base(tmp_path / "base")
    expected = merged_by_peft(base, save_adapter(base, tmp_path / "adapter"))
    for file in (tmp_path / "adapter").glob("adapter_*"):
        file.rename(base / file.name)
    upscale(base=base, method="llama-pro", output=tmp_path / "out", adapter=base)
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), expected(prompt()).logits)


def test_base_and_adapter_come_from_the_hub(tmp_path, hub):
    base = save_base(tmp_path / "base", max_shard_size="40KB")
    adapter = save_adapter(base, tmp_path / "adapter")
    hub.repositories |= {"org/base": Repository(files_of(base)), "me/lora": Repository(files_of(adapter))}
    upscale(base="org/base", method="llama-pro", output=tmp_path / "out", adapter="me/lora")
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), merged_by_peft(base, adapter)(prompt()).logits)
    assert record_of(tmp_path / "out")["base"]["adapter"]["name"] == "me/lora"


def edited(**changes: Any):
    def edit(base: Path, adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def saved(**config: Any):
    return lambda base, adapter: save_adapter(base, adapter, **config)


def for_another(**changes: Any):
    return lambda base, adapter: save_adapter(save_base(base.parent / "another", **changes), adapter)


def without(name: str):
    return lambda base, adapter: (adapter / name).unlink()


def beside_a_stored_copy(base: Path, adapter: Path) -> None:
    save_base(base, tie_word_embeddings=True)
    save_adapter(base, adapter, **ADAPTERS["embedding"])
    tensors = read_tensors(base)
    write_tensors(base, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def of_an_upscaled_base(base: Path, adapter: Path) -> None:
    upscale(base=base, method="llama-pro", output=base.with_name("upscaled"), verify=False)
    shutil.rmtree(base)
    base.with_name("upscaled").rename(base)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n"
HEAD = {"modules_to_save": ["lm_head"]}
NOT_PLAIN = "; expected a LoRA, rsLoRA or DoRA"
REFUSED = {
    "other kinds": (edited(peft_type="IA3"), r"cannot be merged .*: its peft_type is 'IA3'; expected .* \(merge_and_unload\)"),
    "dora of embeddings": (
        saved(use_dora=True, target_modules=["embed_tokens"]),
        "embed_tokens has embedding_A, embedding_B, magnitude_vector; expected a LoRA",
    ),
    "what comes next": (edited(use_novelty={"x": 1}), "it has use_novelty = .'x': 1.; expected a LoRA, rsLoRA or DoRA"),
    "biases": (edited(bias="all"), f"it has bias = 'all'{NOT_PLAIN}"),
    "residual starts": (edited(init_lora_weights="pissa"), f"it has init_lora_weights = 'pissa'{NOT_PLAIN}"),
    "whole modules": (saved(**HEAD), rf"it has modules_to_save = \['lm_head'\]{NOT_PLAIN}"),
    "whole modules, unlisted": (
        lambda base, adapter: (saved(**HEAD)(base, adapter), edited(modules_to_save=None)(base, adapter)),
        f"it holds base_model.model.lm_head.weight as F32{NOT_PLAIN}",
    ),
    "another model": (
        for_another(num_hidden_layers=6),
        r"changes model.layers.\d.mlp.down_proj.weight, which the base does not hold; .* Give",
    ),
    "another width": (
        for_another(intermediate_size=64),
        r"has matrices \[32, 4\] and \[4, 64\] for model.layers.0.mlp.down_proj.weight; expected rank 4 and a product of \[32, 48\]",
    ),
    "another rank": (edited(r=8), r"expected rank 8 and a product of .* Give the base that the adapter was made for"),
    "a stored copy of a tied embedding": (
        beside_a_stored_copy,
        "changes model.embed_tokens.weight or lm_head.weight, which the config ties, .* Merge the adapter",
    ),
    "an upscaled base": (
        of_an_upscaled_base,
        "would be merged into a model that `upscale` made, whose layers .* Merge the adapter when you",
    ),
    "a type that transformers converts": (
        lambda base, adapter: (shutil.rmtree(base), tiny_model("mixtral").save_pretrained(base)),
        "would be merged into a 'mixtral' model, whose tensors transformers converts .* Merge the adapter",
    ),
    "a pointer of Git LFS": (
        lambda base, adapter: (adapter / "adapter_model.safetensors").write_text(POINTER),
        "adapter_model.safetensors of .* is a Git LFS pointer, not the file; expected what git-lfs downloads. Run git lfs pull",
    ),
    "no matrices": (without("adapter_model.safetensors"), r"or no adapter_model.safetensors \(FileNotFoundError\)"),
    "no config": (
        without("adapter_config.json"),
        r"has no valid adapter_config.json or no .* \(FileNotFoundError\); expected a LoRA that PEFT saved. Give its folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_of_the_base_is_refused(tmp_path, command, refused, case):
    base = save_base(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter")
    mutate, message = REFUSED[case]
    mutate(base, tmp_path / "adapter")
    outcome = command(
        "--base", base, "--adapter", tmp_path / "adapter", "--method", "llama-pro", "--output", tmp_path / "out"
    )
    refused(outcome, message, None)


def test_an_adapter_that_is_not_there_is_refused(base, command, refused):
    words = ("--base", base, "--method", "llama-pro", "--output", "out", "--adapter")
    refused(
        command(*words, "/no/such"), "adapter '/no/such' is neither a folder nor a hub id; expected one of them", None
    )
    refused(command(*words, "no-such"), "'no-such' is no local folder, and the Hub cannot be reached", None)


def test_a_tied_embedding_that_is_stored_as_the_head_takes_an_adapter(tmp_path):
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "adapter", **ADAPTERS["embedding"])
    tensors = read_tensors(base)
    write_tensors(base, {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()})
    upscale(base=base, method="llama-pro", adapter=adapter, output=tmp_path / "out")
    with torch.no_grad():
        expected = merged_by_peft(base, adapter)(input_ids=prompt()).logits
    assert torch.equal(logits(tmp_path / "out"), expected)
