"""gpt-oss as it is published: experts in MXFP4 stay as they are, and are multiplied out where something is computed from them."""

from pathlib import Path

import pytest
import torch
from pairs import by_default
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizers_utils import should_convert_module

from midus_hf.models.inference.tiny import tiny_model
from tests.upscalers.checkpoints import (
    config_of,
    edit_config,
    load,
    logits,
    long_prompt,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    write_tensors,
)
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

OPTIONS = {
    "midus-hml": {"n": 8, "k": 3},
    "llama-pro": {},
    "moc": {**SMALL_CHAPTERS, "site": "behind-attention"},
    "ultramem-v2": SMALL_TABLES,
}
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture
def base(tmp_path) -> Path:
    """A tiny gpt-oss with random experts in MXFP4."""
    folder, draw = tmp_path / "base", torch.Generator().manual_seed(1)
    model_class = type(tiny_model("gpt_oss"))
    config = tiny_model("gpt_oss").config
    config.intermediate_size = 64
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
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
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": KEPT})
    return folder


def test_experts_are_read_as_transformers_reads_them(base):
    stored, opened = read_tensors(base), open_base(base)
    assert len(opened.packed) == 8 and not set(opened.unexpected) - opened.parts
    for name in opened.packed:
        expected = convert_moe_packed_tensors(stored[name + "_blocks"], stored[name + "_scales"])
        assert same_bits(read_tensor(opened.tensors[name]), expected)


@pytest.mark.parametrize("method", by_default(["midus-hml", "llama-pro", "ultramem-v2"], OPTIONS))
def test_the_result_computes_what_transformers_computes_with_the_base(base, tmp_path, method):
    report = upscale(base=base, method=method, options=OPTIONS[method], output=tmp_path / "out")
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert torch.equal(*(logits(folder, input_ids=long_prompt()) for folder in (tmp_path / "out", base)))
    assert report.parameters.base == sum(parameter.numel() for parameter in load(base).parameters())
    assert report.parameters.total == sum(parameter.numel() for parameter in load(tmp_path / "out").parameters())
    stored, kept = read_tensors(tmp_path / "out"), read_tensors(base)
    held = {tensor.view(torch.uint8).numpy().tobytes() for tensor in stored.values()}
    assert all(tensor.view(torch.uint8).numpy().tobytes() in held for tensor in kept.values())  # byte for byte
    assert sum(name.endswith("_blocks") for name in stored) == 8
    listed = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert listed[:4] == KEPT and len(listed) > 4
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)
    assert config_of(tmp_path / "stripped")["quantization_config"] == config_of(base)["quantization_config"]
    assert record_of(tmp_path / "out")["base"]["tensor_sha256"].keys() == {
        name.removeprefix("model.") for name in kept
    }


def test_experts_of_new_layers_are_multiplied_out(base, tmp_path):
    upscale(base=base, method="llama-pro", num_new_layers=2, output=tmp_path / "out")  # layers 2 and 5 are new
    stored, kept = read_tensors(tmp_path / "out"), read_tensors(base)
    for new, source in ((2, 1), (5, 3)):
        name = f"model.layers.{source}.mlp.experts.gate_up_proj"
        expected = convert_moe_packed_tensors(kept[name + "_blocks"], kept[name + "_scales"])
        assert same_bits(stored[f"model.layers.{new}.mlp.experts.gate_up_proj"], expected)
        assert not stored[f"model.layers.{new}.mlp.experts.down_proj"].any()
    # A machine with MXFP4 kernels replaces the modules whose weights are stored in MXFP4.
    quantization = config_of(tmp_path / "out")["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    experts = [name for name, module in model.named_modules() if isinstance(module, GptOssExperts)]
    replaced = {name for name in experts if should_convert_module(name, quantization["modules_to_not_convert"])}
    assert replaced == {name.rpartition(".")[0] for name in stored if name.endswith("_blocks")}


def test_scales_that_do_not_fit_are_refused(base, tmp_path, command, refused):
    tensors = read_tensors(base)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    write_tensors(base, tensors | {name: tensors[name][:, :-1].contiguous()})
    outcome = command("--base", base, "--method", "moc", "--output", tmp_path / "out")
    message = (
        r"model.layers.1.mlp.experts.down_proj_blocks is \[4, 32, 2, 16\] with scales \[4, 31, 2\]; expected "
        "model.layers.1.mlp.experts.down_proj_scales with an exponent for each 16 bytes. Start from the unquantised checkpoint"
    )
    refused(outcome, message, ["base"])
