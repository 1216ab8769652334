"""Bases in FP8 with a scale per block: copies stay as they are, and transformers loads base and result to the same bits."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from pairs import by_default
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

from tests.upscalers.checkpoints import (
    config_of,
    edit_config,
    logits,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    save_base,
    with_memory,
    write_tensors,
)
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

BLOCK = 16
OPTIONS = {
    "midus-hml": {"n": 8, "k": 2},
    "midus-linear": {"slots": 16, "k": 2},
    "moc": SMALL_CHAPTERS,
    "ultramem-v2": SMALL_TABLES,
    "moda": {},
    "llama-pro": {},
    "solar": {},
    "avg-deus": {},
    "opt-deus": {},
}
METHODS = ["midus-hml", "moc", "llama-pro", "solar", "avg-deus"]
FAMILIES = ["llama", "qwen3", "gemma2"]


def save_scaled(folder: Path, family: str = "llama", *, kept: list[str] | None = None, **changes) -> Path:
    """A tiny base whose layers' matrices are FP8 with scales of blocks of 16 x 16, but for modules that are kept."""
    save_base(folder, family, torch.bfloat16, **{"intermediate_size": 48, **changes})
    tensors = read_tensors(folder)
    for name, weight in list(tensors.items()):
        if "layers" not in name or weight.ndim != 2 or any(module in name for module in kept or []):
            continue
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(weight.shape)
        tensors[name + "_scale_inv"] = scales
    write_tensors(folder, tensors)
    listed = {} if kept is None else {"modules_to_not_convert": ["lm_head", *kept]}
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        **listed,
    }
    edit_config(folder, quantization_config=quantization)
    return folder


@pytest.mark.parametrize(
    ("method", "family"),
    by_default(
        [*((method, "llama") for method in METHODS), ("midus-hml", "gemma2")], itertools.product(OPTIONS, FAMILIES)
    ),
)
def test_the_result_computes_what_transformers_computes_with_the_base(tmp_path, method, family):
    base = save_scaled(tmp_path / "base", family)
    report = upscale(base=base, method=method, options=OPTIONS[method], output=tmp_path / "out")
    assert report.identity.checked == "logits"
    expected, made = logits(base), logits(tmp_path / "out")
    if report.promises_identity:
        assert report.identity.max_abs_diff == 0.0 and torch.equal(made, expected)
    else:
        assert report.identity.max_abs_diff > 0 and not torch.equal(made, expected)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(parameter.dtype == torch.bfloat16 for parameter in loaded.parameters())

    stored, kept = read_tensors(tmp_path / "out"), read_tensors(base)
    scaled = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert {name + "_scale_inv" for name in scaled} == {name for name in stored if name.endswith("_scale_inv")}
    held = {tensor.view(torch.uint8).numpy().tobytes() for tensor in stored.values()}
    assert all(tensor.view(torch.uint8).numpy().tobytes() in held for tensor in kept.values())  # byte for byte


@pytest.mark.parametrize(
    "method",
    by_default(["midus-hml", "moc", "llama-pro"], sorted({*OPTIONS} - {"solar", "ultramem-v2"})),
)
def test_stripping_gives_the_quantised_base_back_and_a_second_upscaling_stacks(tmp_path, method):
    base = save_scaled(tmp_path / "base", kept=["model.layers.2.mlp.down_proj", "self_attn.o_proj"])
    upscale(base=base, method=method, options=OPTIONS[method], output=tmp_path / "out")
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)
    assert config_of(tmp_path / "stripped") == config_of(base)
    digests = record_of(tmp_path / "out")["base"]["tensor_sha256"]
    assert len(digests) == len(read_tensors(base))
    second = "ultramem-v2"
    again = upscale(base=tmp_path / "out", method=second, options=OPTIONS[second], output=tmp_path / "again")
    assert again.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "out"))
    strip(tmp_path / "again", tmp_path / "back")
    assert same_tensors(tmp_path / "back", tmp_path / "out")


def test_modules_that_are_not_quantised_are_listed_where_the_plan_puts_them(tmp_path):
    base = save_scaled(tmp_path / "base", kept=["model.layers.2.mlp.down_proj", "self_attn.o_proj"])
    upscale(base=base, method="llama-pro", output=tmp_path / "out")  # new layers 2 and 5
    quantization = config_of(tmp_path / "out")["quantization_config"]
    listed = ["lm_head", "model.layers.3.mlp.down_proj", "self_attn.o_proj", "model.layers.2", "model.layers.5"]
    assert quantization["modules_to_not_convert"] == listed
    stored = read_tensors(tmp_path / "out")
    assert {str(stored[f"model.layers.{layer}.mlp.up_proj.weight"].dtype) for layer in (2, 5)} == {"torch.bfloat16"}


@pytest.mark.parametrize("method", by_default(["midus-hml", "llama-pro"], OPTIONS))
def test_a_machine_with_fp8_kernels_replaces_the_modules_that_are_stored_in_fp8(tmp_path, method):
    base = save_scaled(tmp_path / "base", kept=["model.layers.2.mlp.down_proj", "self_attn.o_proj"])
    upscale(base=base, method=method, options=OPTIONS[method], output=tmp_path / "out", verify=False)
    quantization = config_of(tmp_path / "out")["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    fp8 = FineGrainedFP8Config(**{key: value for key, value in quantization.items() if key != "quant_method"})
    model = replace_with_fp8_linear(model, quantization["modules_to_not_convert"], fp8, pre_quantized=True)
    replaced = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    stored = read_tensors(tmp_path / "out")
    in_fp8 = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert replaced == in_fp8 and len(in_fp8) >= 4 * 6 - 1


def drop_scales(base: Path) -> None:
    tensors = read_tensors(base)
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    write_tensors(base, tensors)


def quantized(**changes):
    def edit(base: Path) -> None:
        path = base / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] |= changes
        path.write_text(json.dumps(config))

    return edit


REFUSED = {
    "uneven blocks": (
        lambda base: write_tensors(
            base, read_tensors(base) | {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(5, 2)}
        ),
        r"model.layers.1.mlp.up_proj.weight is stored as F8_E4M3 with scales \[5, 2\]; expected model.layers.1.mlp.up_proj"
        r".weight_scale_inv with a scale for each of equal blocks of \[48, 32\]. Start from the unquantised checkpoint",
    ),
    "no scales": (drop_scales, r"up_proj.weight is stored as F8_E4M3 with scales \[\]; expected"),
    "scales of activations": (
        quantized(activation_scheme="static"),
        r"the base is quantised .quantization_config: fp8.; expected float32, float16 or bfloat16 weights, or FP8 with a scale per "
        "block in one of: llama, .* Start from the unquantised checkpoint",
    ),
    "whole tensors": (quantized(weight_block_size=None), "the base is quantised .quantization_config: fp8.; expected"),
    "scales that are powers of two": (
        quantized(scale_fmt="ue8m0"),
        "the base is quantised .quantization_config: fp8.; ",
    ),
    "a list of what is in FP8": (
        quantized(modules_to_convert=["mlp"]),
        "the base is quantised .quantization_config: fp8.; expected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_forms_of_fp8_are_refused(tmp_path, command, refused, case):
    base = save_scaled(tmp_path / "base")
    mutate, message = REFUSED[case]
    mutate(base)
    refused(command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out"), message, ["base"])


def test_another_dtype_leaves_quantised_weights_and_their_scales(tmp_path):
    base = save_scaled(tmp_path / "base")
    with_memory(base, tmp_path / "out", dtype="float16", verify=False)
    made, expected = read_tensors(tmp_path / "out"), read_tensors(base)
    name = "model.layers.0.mlp.up_proj.weight"
    assert any(same_bits(tensor, expected[name]) for tensor in made.values())
    assert any(same_bits(tensor, expected[name + "_scale_inv"]) for tensor in made.values())
    assert made["model.norm.weight"].dtype == torch.float16
