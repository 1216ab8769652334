"""Bases in FP8 and MXFP4: copies stay as they are stored, and transformers loads base and result to the same bits."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from pairs import by_default
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizers_utils import should_convert_module

from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import (
    SMALL,
    config_of,
    edit_config,
    logits,
    long_prompt,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    save_base,
    with_memory,
    write_tensors,
)
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

BLOCK = 16
OPTIONS = {
    "midus-hml": SMALL["midus-hml"],
    "midus-linear": SMALL["midus-linear"],
    "moc": SMALL_CHAPTERS,
    "ultramem-v2": SMALL_TABLES,
    "moda": {},
    "llama-pro": {},
    "solar": {},
    "avg-deus": {},
    "opt-deus": {},
}
KEPT = ("model.layers.2.mlp.down_proj", "self_attn.o_proj")
KEPT_BESIDE_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


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


def save_packed(folder: Path) -> Path:
    """A tiny gpt-oss with random experts in MXFP4."""
    draw = torch.Generator().manual_seed(1)
    tiny_model("gpt_oss", intermediate_size=64).to(torch.bfloat16).save_pretrained(folder)
    tensors = {}
    for name, weight in read_tensors(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            tensors[name + "_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=draw)
        else:
            tensors[name] = weight
    write_tensors(folder, tensors)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": KEPT_BESIDE_EXPERTS})
    return folder


BASES: dict[str, Callable[[Path], Path]] = {
    **{family: lambda folder, family=family: save_scaled(folder, family) for family in ("llama", "qwen3", "gemma2")},
    "partly": lambda folder: save_scaled(folder, kept=KEPT),
    "gpt_oss": save_packed,
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> Callable[[str], Path]:
    """Return a base of `BASES`, saved once; nobody may change it."""
    return cache(lambda name: BASES[name](tmp_path_factory.mktemp(name) / "base"))


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


OF_EXPERTS = ("midus-hml", "moc", "ultramem-v2", "llama-pro")
# By default each kind of method on a base in FP8, and one that inserts, copies or adds on the others.
IN_TURN = [
    *((method, "llama") for method in ("midus-hml", "moc", "llama-pro", "solar", "avg-deus")),
    ("midus-hml", "gemma2"),
    *((method, "partly") for method in ("midus-hml", "moc", "llama-pro")),
    *((method, "gpt_oss") for method in ("midus-hml", "llama-pro", "ultramem-v2")),
]
ALL = [pair for pair in itertools.product(OPTIONS, BASES) if pair[1] != "gpt_oss" or pair[0] in OF_EXPERTS]


@pytest.mark.parametrize(("method", "name"), by_default(IN_TURN, ALL))
def test_the_result_computes_what_transformers_computes_with_the_base_and_is_stripped(
    quantised, tmp_path, method, name
):
    base = quantised(name)
    report = upscale(base=base, method=method, options=OPTIONS[method], output=tmp_path / "out")
    expected, made = (logits(folder, input_ids=long_prompt()) for folder in (base, tmp_path / "out"))
    assert report.identity.checked == "logits"
    assert (report.identity.max_abs_diff == 0.0) == torch.equal(made, expected) == report.promises_identity
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert report.parameters.total == sum(parameter.numel() for parameter in model.parameters())
    stored, kept = read_tensors(tmp_path / "out"), read_tensors(base)
    held = {tensor.view(torch.uint8).numpy().tobytes() for tensor in stored.values()}
    assert all(tensor.view(torch.uint8).numpy().tobytes() in held for tensor in kept.values())  # byte for byte
    # A machine with kernels for the format replaces the modules that are stored in it.
    quantization = config_of(tmp_path / "out")["quantization_config"]
    kind, sign = (GptOssExperts, "_blocks") if name == "gpt_oss" else (nn.Linear, "_scale_inv")
    modules = [path for path, module in model.named_modules() if isinstance(module, kind) and path != "lm_head"]
    replaced = {path for path in modules if should_convert_module(path, quantization.get("modules_to_not_convert"))}
    assert replaced == {each.rpartition(".")[0] for each in stored if each.endswith(sign)} != set()
    assert name != "gpt_oss" or quantization["modules_to_not_convert"][:4] == KEPT_BESIDE_EXPERTS
    assert name != "partly" or "lm_head" in quantization["modules_to_not_convert"]
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base) and config_of(tmp_path / "stripped") == config_of(base)
    digests = record_of(tmp_path / "out")["base"]["tensor_sha256"]
    assert digests.keys() == {each.removeprefix("model.") for each in kept}


@pytest.mark.parametrize("method", by_default(["moc", "llama-pro"], sorted({*OPTIONS} - {"solar", "ultramem-v2"})))
def test_a_second_upscaling_stacks(quantised, tmp_path, method):
    upscale(base=quantised("partly"), method=method, options=OPTIONS[method], output=tmp_path / "out", verify=False)
    second = {"method": "ultramem-v2", "options": SMALL_TABLES}
    again = upscale(base=tmp_path / "out", output=tmp_path / "again", **second)
    assert again.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "out"))
    strip(tmp_path / "again", tmp_path / "back")
    assert same_tensors(tmp_path / "back", tmp_path / "out")


def test_experts_in_mxfp4_are_read_and_made_into_new_layers_as_transformers_multiplies_them_out(quantised, tmp_path):
    kept, opened = read_tensors(quantised("gpt_oss")), open_base(quantised("gpt_oss"))
    assert len(opened.packed) == 8 and not set(opened.unexpected) - opened.parts
    expected = {
        name: convert_moe_packed_tensors(kept[name + "_blocks"], kept[name + "_scales"]) for name in opened.packed
    }
    assert all(same_bits(read_tensor(opened.tensors[name]), tensor) for name, tensor in expected.items())
    upscale(base=quantised("gpt_oss"), method="llama-pro", num_new_layers=2, output=tmp_path / "out")
    stored, name = read_tensors(tmp_path / "out"), "model.layers.{}.mlp.experts.gate_up_proj"
    for new, source in ((2, 1), (5, 3)):
        assert same_bits(stored[name.format(new)], expected[name.format(source)])


def quantization(**changes) -> Callable[[Path], None]:
    """Set keys of `quantization_config`; those set to `...` are removed."""

    def edit(base: Path) -> None:
        values = {**config_of(base)["quantization_config"], **changes}
        edit_config(base, quantization_config={key: value for key, value in values.items() if value is not ...})

    return edit


PARTIAL = (24, 20)  # of [32, 32], [48, 32] and others


@pytest.mark.parametrize("block", [(BLOCK, BLOCK), PARTIAL, (128, 128), None])
def test_new_layers_are_made_from_the_products_by_the_blocks_of_the_config(tmp_path, block):
    base = save_scaled(tmp_path / "base", block=block)
    if block == (128, 128):
        quantization(weight_block_size=...)(base)  # what transformers assumes
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


def test_a_list_of_kept_modules_under_its_other_name_is_followed(quantised, tmp_path):
    base = shutil.copytree(quantised("partly"), tmp_path / "base")
    quantization(modules_to_not_convert=..., ignored_layers=["lm_head", KEPT[0]])(base)
    upscale(base=base, method="llama-pro", placement=[1], output=tmp_path / "out", verify=False)
    followed = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert followed == ["lm_head", "model.layers.3.mlp.down_proj", "model.layers.1"]


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
PACKED = "model.layers.1.mlp.experts.down_proj"
QUANTISED = "the base is quantised .quantization_config: fp8.; expected float32, float16 or bfloat16 weights, or FP8 with a scale "
REFUSED = {
    "too many scales": (
        lambda base: write_tensors(base, read_tensors(base) | {f"{UP}_scale_inv": torch.ones(5, 2)}),
        rf"{UP} is \[48, 32\] in F8_E4M3 with scales \[5, 2\]; expected {UP}_scale_inv with scales \[3, 2\], one for each of its "
        "blocks of 16 x 16 .weight_block_size.. Start from the unquantised checkpoint",
    ),
    "no scales": (
        lambda base: write_tensors(base, {n: t for n, t in read_tensors(base).items() if n != f"{UP}_scale_inv"}),
        r"up_proj.weight is \[48, 32\] in F8_E4M3 with no scales; expected",
    ),
    "no size of blocks": (
        quantization(weight_block_size=[128]),
        r"quantization_config has weight_block_size = \[128\]; expected rows and columns, such as \[128, 128\], or null for one "
        "scale per weight. Restore the config.json that the base was published with.",
    ),
    "no quantization_config": (
        lambda base: edit_config(base, quantization_config=...),
        "weight is stored as F8_E4M3; expected float32, float16 or bfloat16 weights, or a quantization_config in config.json that "
        "says what they mean. Start from the unquantised checkpoint.",
    ),
    "scales of blocks for whole tensors": (
        quantization(weight_block_size=None),
        rf"with scales \[2, 3\]; expected {DOWN}_scale_inv with one scale. Start from the",
    ),
    "scales of activations": (
        quantization(activation_scheme="static"),
        f"{QUANTISED}per block or weight in one of: llama, .* Start from the unquantised checkpoint",
    ),
    "scales that are powers of two": (quantization(scale_fmt="ue8m0"), QUANTISED),
    "a list of what is in FP8": (quantization(modules_to_convert=["mlp"]), QUANTISED),
    "exponents of MXFP4": (
        lambda base: write_tensors(base, {n: t[:, :-1] if n == f"{PACKED}_scales" else t for n, t in read_tensors(base).items()}),
        rf"{PACKED}_blocks is \[4, 32, 2, 16\] with scales \[4, 31, 2\]; expected {PACKED}_scales with an exponent for each 16 "
        "bytes. Start from the unquantised checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_forms_are_refused(quantised, tmp_path, command, refused, case):
    base = shutil.copytree(quantised("gpt_oss" if "MXFP4" in case else "llama"), tmp_path / "base")
    mutate, message = REFUSED[case]
    mutate(base)
    refused(command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out"), message, ["base"])


def test_another_dtype_leaves_quantised_weights_and_their_scales(quantised, tmp_path):
    base = quantised("llama")
    with_memory(base, tmp_path / "out", dtype="float16", verify=False)
    made, expected = read_tensors(tmp_path / "out"), read_tensors(base)
    name = "model.layers.0.mlp.up_proj.weight"
    assert any(same_bits(tensor, expected[name]) for tensor in made.values())
    assert any(same_bits(tensor, expected[name + "_scale_inv"]) for tensor in made.values())
    assert made["model.norm.weight"].dtype == torch.float16
