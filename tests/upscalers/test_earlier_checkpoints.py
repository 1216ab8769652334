"""Checkpoints that earlier code wrote still load, compute, train, strip and stack: every one in `tests/fixtures/checkpoints`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models.optimizer_steps import train_steps
from pairs import in_turn
from safetensors.torch import load_file
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.memory.registry import MemoryModule
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates
from tests.upscalers.checkpoints import SMALL_MEMORY, content_digest, load, read_tensors, same_bits, same_tensors
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

ROOT = Path(__file__).parent.parent / "fixtures" / "checkpoints"
EVERY = [str(file.parent.relative_to(ROOT)) for file in sorted(ROOT.glob("*/*/config.json"))]


@cache
def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


UPSCALED = [name for name in EVERY if "upscale" in config_of(ROOT / name)]


@cache
def base_of(folder: Path) -> Path:
    """The fixture that this one was made from, by the digest of its weights: training leaves no name of it."""
    digest = config_of(folder)["upscale"]["base_sha256"]
    return next(ROOT / name for name in EVERY if content_digest(read_tensors(ROOT / name)) == digest)


def dtype_of(folder: Path) -> torch.dtype:
    return getattr(torch, config_of(folder)["dtype"])


def stored_logits(folder: Path) -> Path:
    """Where the logits lie of a model that does not compute what its base does."""
    return folder.with_name(f"{folder.name}.logits.safetensors")


def logits(folder: Path, dtype: torch.dtype | str = "auto", tokens: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return load(folder, dtype)(prompt() if tokens is None else tokens).logits


@pytest.fixture(params=UPSCALED)
def upscaled(request) -> Path:
    """Each upscaled checkpoint, trained or not, in turn."""
    return ROOT / request.param


def test_there_are_checkpoints_with_memories_without_the_code_that_is_written_beside_them():
    assert any(config_of(ROOT / name)["model_type"].startswith("midus_") for name in UPSCALED)
    assert not list(ROOT.rglob("*.py"))


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_of_the_file_is_loaded_and_no_other_is_wanted(name):
    model, told = AutoModelForCausalLM.from_pretrained(ROOT / name, output_loading_info=True, local_files_only=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored, loaded = read_tensors(ROOT / name), model.state_dict()
    assert {parameter for parameter, _ in model.named_parameters()} <= stored.keys()
    assert [key for key, tensor in stored.items() if not same_bits(loaded[key], tensor)] == []


def test_it_computes_what_it_computed_when_it_was_written(upscaled):
    base = base_of(upscaled)
    if not stored_logits(upscaled).is_file():
        assert torch.equal(logits(upscaled), logits(base, dtype_of(upscaled)))
        return
    stored = load_file(stored_logits(upscaled))
    torch.testing.assert_close(
        logits(upscaled, torch.float32, stored["tokens"]), stored["logits"], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(logits(base, torch.float32, stored["tokens"]), stored["logits"], atol=1e-2)


def test_generation_with_a_cache_takes_the_tokens_of_whole_passes(upscaled):
    model, tokens = load(upscaled, torch.float32), prompt(length=12, batch=1)
    generated = model.generate(tokens, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        best = model(generated, use_cache=False).logits.argmax(-1)
    assert generated.shape == (1, 20)
    assert torch.equal(generated[:, 12:], best[:, 11:-1])


def test_strip_gives_back_what_it_was_made_from(upscaled, tmp_path):
    base, dtype = base_of(upscaled), dtype_of(upscaled)
    result = strip(upscaled, tmp_path / "stripped")
    expected, stripped = read_tensors(base), read_tensors(tmp_path / "stripped")
    assert stripped.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same_bits(stripped[name], tensor.to(dtype))] == []
    assert result["base_confirmed"] is (dtype == dtype_of(base))
    config = json.loads((tmp_path / "stripped" / "config.json").read_text())
    assert config == {**config_of(base), "dtype": config_of(upscaled)["dtype"]}
    assert (tmp_path / "stripped" / "modeling_midus.py").is_file() is config["model_type"].startswith("midus_")


@pytest.mark.parametrize(("name", "second"), in_turn(UPSCALED, ["llama-pro", "midus-hml"]))
def test_layers_and_memories_stack_on_it_and_come_off_again(name, second, tmp_path):
    upscaled = ROOT / name
    with_memory = {layer for entry in config_of(upscaled).get("memory", []) for layer in entry["layers"]}
    dense = next(layer for layer in range(config_of(upscaled)["num_hidden_layers"]) if layer not in with_memory)
    request = {"placement": [dense + 1]} if second == "llama-pro" else {"placement": [1, 4], "options": SMALL_MEMORY}
    upscale(base=upscaled, method=second, output=tmp_path / "twice", verify=False, **request)
    assert torch.equal(logits(tmp_path / "twice"), logits(upscaled))
    strip(tmp_path / "twice", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", upscaled)


def test_it_trains_and_what_was_trained_is_saved_and_loaded(upscaled, tmp_path):
    model = load(upscaled)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_trainable(model)
    train_steps(model, 1, parameter_groups(model, Rates(learning_rate=0.01)))
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    banks = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, MemoryModule)
        for name in module.names_of("value")
    }
    assert moved
    assert banks & training <= moved <= training

    model.save_pretrained(tmp_path / "trained")
    has_memory = config_of(upscaled)["model_type"].startswith("midus_")
    assert (tmp_path / "trained" / "modeling_midus.py").is_file() is has_memory
    loaded, saved = load(tmp_path / "trained").state_dict(), model.state_dict()
    assert loaded.keys() == saved.keys()
    assert [name for name, tensor in saved.items() if not same_bits(loaded[name], tensor)] == []


def test_inspect_counts_what_was_recorded(upscaled):
    told, entry = inspect_checkpoint(upscaled), config_of(upscaled)["upscale"]
    assert told["method"] == entry["method"]
    assert [layer["index"] for layer in told["layers"] if layer["new"]] == entry["new_layers"]
    assert entry["options"].items() <= told["options"].items()
    assert told["parameters"]["total"] == sum(parameter.numel() for parameter in load(upscaled).parameters())
    if (upscaled / "upscale.json").is_file():
        record = json.loads((upscaled / "upscale.json").read_text())
        assert told["parameters"] == {key: record["parameters"][key] for key in ("total", "new")}
        assert told["base"] == record["base"]["name"]
