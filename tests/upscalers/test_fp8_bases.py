"""Bases in FP8 with a scale per block or weight: copies stay as they are, and transformers loads base and result to the same bits."""

import itertools
import shutil
from collections.abc import Sequence
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
KEPT = ("model.layers.2.mlp.down_proj", "self_attn.o_proj")


def save_scaled(
    folder: Path,
    family: str = "llama",
    *,
    kept: Sequence[str] | None = None,
    block: tuple[int, int] | None = (BLOCK, BLOCK),
) -> Path:
    """A tiny base whose layers' matrices are FP8 with a scale per block, or one scale each, but for modules that are kept."""
    save_base(folder, family, torch.bfloat16, intermediate_size=48)
    tensors = read_tensors(folder)
    for name, weight in list(tensors.items()):
        if "layers" not in name or weight.ndim != 2 or any(module in name for module in kept or []):
            continue
        if "q_proj" in name:  # rows of very different size, as outlier channels make them
            weight = weight * torch.logspace(0, 2, len(weight))[:, None]
        scales = block_scales(weight.float(), block)
        tensors[name] = (weight.float() / spread(scales, weight.shape, block)).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
    write_tensors(folder, tensors)
    size = None if block is None else list(block)
    quantization = {"quant_method": "fp8", "weight_block_size": size, "activation_scheme": "dynamic"}
    listed = {} if kept is None else {"modules_to_not_convert": ["lm_head", *kept]}
    edit_config(folder, quantization_config={**quantization, **listed})
    return folder


@pytest.fixture(scope="module")
def partly(tmp_path_factory) -> Path:
    """A base some of whose modules are not quantised; nobody may change it."""
    return save_scaled(tmp_path_factory.mktemp("partly") / "base", kept=KEPT)


def block_scales(weight: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """The scale of each block, which may be partial at the ends, or the one of the weight."""
    if block is None:
        return weight.abs().max() / 448
    blocks = [[part.abs().max() for part in rows.split(block[1], 1)] for rows in weight.split(block[0])]
    return torch.tensor(blocks) / 448


def spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> torch.Tensor:
    """The scale of each element."""
    if block is None:
        return scales.expand(shape)
    by_row = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return by_row.repeat_interleave(block[1], 1)[:, : shape[1]]


def product(tensors: dict[str, torch.Tensor], name: str, block: tuple[int, int] | None) -> torch.Tensor:
    """What a quantised weight means."""
    return tensors[name].float() * spread(tensors[name + "_scale_inv"], tensors[name].shape, block)


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
def test_stripping_gives_the_quantised_base_back_and_a_second_upscaling_stacks(partly, tmp_path, method):
    upscale(base=partly, method=method, options=OPTIONS[method], output=tmp_path / "out", verify=False)
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", partly)
    assert config_of(tmp_path / "stripped") == config_of(partly)
    assert len(record_of(tmp_path / "out")["base"]["tensor_sha256"]) == len(read_tensors(partly))
    second = {"method": "ultramem-v2", "options": OPTIONS["ultramem-v2"]}
    again = upscale(base=tmp_path / "out", output=tmp_path / "again", **second)
    assert again.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "out"))
    strip(tmp_path / "again", tmp_path / "back")
    assert same_tensors(tmp_path / "back", tmp_path / "out")


@pytest.mark.parametrize("method", by_default(["midus-hml", "llama-pro"], OPTIONS))
def test_a_machine_with_fp8_kernels_replaces_the_modules_that_are_stored_in_fp8(partly, tmp_path, method):
    upscale(base=partly, method=method, options=OPTIONS[method], output=tmp_path / "out", verify=False)
    quantization = config_of(tmp_path / "out")["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    fp8 = FineGrainedFP8Config(**{key: value for key, value in quantization.items() if key != "quant_method"})
    model = replace_with_fp8_linear(model, quantization["modules_to_not_convert"], fp8, pre_quantized=True)
    replaced = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    stored = read_tensors(tmp_path / "out")
    in_fp8 = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert replaced == in_fp8 and len(in_fp8) >= 4 * 6 - 1


PARTIAL = (24, 20)  # of [32, 32], [48, 32] and others


@pytest.mark.parametrize("block", [(BLOCK, BLOCK), PARTIAL, (128, 128), None])
def test_new_layers_are_made_from_the_products_by_the_blocks_of_the_config(tmp_path, block):
    base = save_scaled(tmp_path / "base", block=block)
    if block == (128, 128):
        edit_quantization(base, weight_block_size=...)  # what transformers assumes
    copied, averaged = tmp_path / "copied", tmp_path / "averaged"
    upscale(base=base, method="llama-pro", num_new_layers=2, output=copied)  # layers 2 and 5 copy layers 1 and 3
    upscale(base=base, method="avg-deus", num_new_layers=1, placement=[3], output=averaged)
    stored, kept, name = read_tensors(copied), read_tensors(base), "model.layers.{}.self_attn.q_proj.weight"
    for new, source in ((2, 1), (5, 3)):
        assert same_bits(stored[name.format(new)], product(kept, name.format(source), block).bfloat16())
    previous, following = (product(kept, name.format(layer), block).bfloat16().float() for layer in (2, 3))
    mean = (previous * 0.5 + following * 0.5).bfloat16()
    assert torch.equal(read_tensors(averaged)[name.format(3)], mean)
    if block != PARTIAL:  # which transformers cannot multiply out
        assert torch.equal(logits(copied), logits(base))


def test_a_list_of_kept_modules_under_its_other_name_is_followed(partly, tmp_path):
    base = shutil.copytree(partly, tmp_path / "base")
    edit_quantization(base, modules_to_not_convert=..., ignored_layers=["lm_head", KEPT[0]])
    upscale(base=base, method="llama-pro", placement=[1], output=tmp_path / "out", verify=False)
    followed = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert followed == ["lm_head", "model.layers.3.mlp.down_proj", "model.layers.1"]


def edit_quantization(base: Path, **changes) -> None:
    """Set keys of `quantization_config`; those set to `...` are removed."""
    values = {**config_of(base)["quantization_config"], **changes}
    edit_config(base, quantization_config={key: value for key, value in values.items() if value is not ...})


def quantized(**changes):
    return lambda base: edit_quantization(base, **changes)


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
QUANTISED = "the base is quantised .quantization_config: fp8.; expected float32, float16 or bfloat16 weights, or FP8 with a scale "
REFUSED = {
    "too many scales": (
        lambda base: write_tensors(base, read_tensors(base) | {f"{UP}_scale_inv": torch.ones(5, 2)}),
        rf"{UP} is \[48, 32\] in F8_E4M3 with scales \[5, 2\]; expected {UP}_scale_inv with scales \[3, 2\], one for each of its "
        "blocks of 16 x 16 .weight_block_size.. Start from the unquantised checkpoint",
    ),
    "other blocks in the config": (
        quantized(weight_block_size=[128, 128]),
        rf"with scales \[2, 3\]; expected {DOWN}_scale_inv with scales \[1, 1\], one for each",
    ),
    "no scales": (
        lambda base: write_tensors(base, {n: t for n, t in read_tensors(base).items() if n != f"{UP}_scale_inv"}),
        r"up_proj.weight is \[48, 32\] in F8_E4M3 with no scales; expected",
    ),
    "no size of blocks": (
        quantized(weight_block_size=[128]),
        r"quantization_config has weight_block_size = \[128\]; expected rows and columns, such as \[128, 128\], or null for one "
        "scale per weight. Restore the config.json that the base was published with.",
    ),
    "no quantization_config": (
        lambda base: edit_config(base, quantization_config=...),
        "weight is stored as F8_E4M3; expected float32, float16 or bfloat16 weights, or a quantization_config in config.json that "
        "says what they mean. Start from the unquantised checkpoint.",
    ),
    "scales of blocks for whole tensors": (
        quantized(weight_block_size=None),
        rf"with scales \[2, 3\]; expected {DOWN}_scale_inv with one scale. Start from the",
    ),
    "scales of activations": (
        quantized(activation_scheme="static"),
        f"{QUANTISED}per block or weight in one of: llama, .* Start from the unquantised checkpoint",
    ),
    "scales that are powers of two": (quantized(scale_fmt="ue8m0"), QUANTISED),
    "a list of what is in FP8": (quantized(modules_to_convert=["mlp"]), QUANTISED),
}  # fmt: skip


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
