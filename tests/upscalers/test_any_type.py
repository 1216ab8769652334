"""Methods on types that no table describes: what each computes, gives back and refuses."""

import itertools
import re
import shutil
from functools import cache
from typing import Any

import pytest
import torch
from models.test_every_type import TYPES
from pairs import by_default, taking_turns
from torch import nn

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from scripts.anatomy.proof import with_more_heads
from scripts.anatomy.reading import gate_and_up
from scripts.anatomy.tiny import tiny_model
from scripts.families import methods_on_the_page
from tests.upscalers.checkpoints import SMALL, write_tensors
from tests.upscalers.contents import config_of, load, long_prompt, read_tensors, same_bits, same_tensors
from tests.upscalers.contents import layer as layer_of
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES, SMALL_TREE, Made, memory_ids, upscaled_config
from upscalers.architecture.built_layout import gain_offset, layer_settings
from upscalers.architecture.layout import find_changed_setting
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.plan import Base, Plan
from upscalers.request import VerificationError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# In an order in which methods and the types of SAMPLE, in turn, fit.
MEMORY: dict[str, dict[str, Any]] = {
    "moc": SMALL_CHAPTERS, "ultramem-v2": SMALL_TABLES, "midus-hml": SMALL["midus-hml"], "moda": {},
    **{f"hier-{kind}": SMALL_TREE for kind in ("kv", "ffn", "lora-ffn", "lora-vo")}, "midus-pkm": SMALL["midus-pkm"],
    "hier-lora-qk": SMALL_TREE, "midus-linear": SMALL["midus-linear"], "engram": {"rows": 101, "width": 16},
}  # fmt: skip
DENSE = {"solar": {}, "lesa": {"hidden_size": 8, "epochs": 1}, "avg-deus": {}, "opt-deus": {}, "llama-pro": {}}
OPTIONS = {**MEMORY, **DENSE}
# Linear attention, shared keys and values, experts in two layouts, a parallel layer, fused projections, latent attention, Mamba.
SAMPLE = ["qwen3_5_text", "gemma4_text", "gpt_oss", "mixtral", "cohere", "phi3", "deepseek_v3", "bamba"]
# Norms that multiply by 1 + weight and have biases; only norms after; fused projections; a feed-forward network of two
# matrices; layers of several kinds; experts after a dense layer; sinks; a mixer next to attention; buffers.
DENSE_SAMPLE = [
    "nemotron", "exaone4", "phi3", "starcoder2", "qwen3_5_text", "deepseek_v3", "granite_swa", "falcon_h1", "apertus", "gemma",
]  # fmt: skip
INFERRED = [model_type for model_type in TYPES if model_type not in MAIN_TYPES]
PRESENT = [model_type for model_type in SAMPLE if model_type in INFERRED]
DENSE_PRESENT = [model_type for model_type in DENSE_SAMPLE if model_type in INFERRED]
# Each method on one type, depth attention where some layers do not rotate queries and keys, a block without the output
# projection in a family that draws this projection, memories in the layers that have attention, a config without `use_cache`;
# stacked projections, and other names of them.
IN_TURN = [(model_type, method) for method, model_type in taking_turns(MEMORY, PRESENT)] if PRESENT else []
OTHERS = (("smollm3", "moda"), ("nanochat", "midus-hml"), ("qwen3_5_text", "hier-kv"), ("inkling_text", "moc"))
OTHERS += tuple(("phi3", method) for method in ("midus-hml", "moda", "hier-kv", "hier-lora-qk", "hier-lora-ffn"))
OTHERS += (("lfm2", "midus-hml"), ("persimmon", "midus-linear"), ("glm", "hier-lora-ffn"))
IN_TURN += [pair for pair in OTHERS if pair[0] in INFERRED]
# In orders such that each method takes its types, and a type whose config lists settings of single layers.
DENSE_IN_TURN = taking_turns(DENSE_PRESENT, DENSE)
DENSE_IN_TURN += [("gemma4_unified_text", "llama-pro")] if "gemma4_unified_text" in INFERRED else []
of_fused = pytest.mark.parametrize("model_type", by_default([*{"phi3", "exaone4", "apertus"} & {*INFERRED}], INFERRED))


def plan_of(made: Made) -> Plan:
    return Plan.from_list(made.config["upscale"]["plan"], config_of(made.base)["num_hidden_layers"])


def options_of(model_type: str, method: str) -> dict[str, Any]:
    adds = method != "moc" or all(parts.adds_mixer for parts in model_type_of(model_type).layers.values())
    return {**OPTIONS[method], **({} if adds else {"site": "behind-layer"})}


@pytest.fixture(scope="module")
def make(shared_base, tmp_path_factory):
    """Upscale a tiny checkpoint of a type, once; skip what docs/families.md does not name."""

    @cache
    def made(model_type: str, method: str) -> Made:
        if method not in methods_on_the_page(model_type):
            pytest.skip("the method does not take the type, as docs/families.md says")
        base = shared_base(model_type, **(with_more_heads(model_type) if method == "moda" else {}))
        output = tmp_path_factory.mktemp("made") / f"{model_type.replace('-', '_')}_{method}"
        request = {"base": base, "output": output, "method": method, "options": options_of(model_type, method)}
        try:
            report = upscale(**request)
        except ValueError as error:
            assert "expected layers of one kind" in str(error) or "expected dense layers" in str(error)
            report = upscale(**request, placement="1")
        return Made(method, base, output, report)

    return made


@pytest.mark.parametrize(("model_type", "method"), by_default(IN_TURN, itertools.product(INFERRED, MEMORY)))
def test_memory_starts_as_the_base_and_strips(model_type, method, make, tmp_path):
    made = make(model_type, method)
    base, model = load(made.base), load(made.output)
    assert made.report.promises_identity
    assert made.report.identity.max_abs_diff == 0.0
    assert type(model).__name__ == f"Midus{type(base).__name__}"
    assert model.config.model_type == f"midus_{model_type}"
    settings = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        expected = base(long_prompt()).logits
        for inputs in ({}, memory_ids(model)):
            assert torch.equal(model(long_prompt(), **inputs).logits, expected)
    assert torch.equal(model.generate(long_prompt(), **settings), base.generate(long_prompt(), **settings))
    result = strip(made.output, tmp_path / "stripped")
    assert result["base_confirmed"] is True
    assert result["differing_tensors"] == 0
    assert same_tensors(made.base, tmp_path / "stripped")
    assert config_of(made.base) == config_of(tmp_path / "stripped")


@pytest.mark.parametrize(("model_type", "method"), by_default(DENSE_IN_TURN, itertools.product(INFERRED, DENSE)))
def test_base_layers_keep_bits_and_new_ones_their_kind(model_type, method, make):
    made = make(model_type, method)
    old, new = read_tensors(made.base), read_tensors(made.output)
    for index, layer in enumerate(plan_of(made).layers):
        source, copied = layer_of(old, plan_of(made).sources[index]), layer_of(new, index)
        assert {name: t.shape for name, t in copied.items()} == {name: t.shape for name, t in source.items()}, index
        if isinstance(layer, Base):
            assert all(same_bits(copied[name], source[name]) for name in source), index
    before, after = load(made.base), load(made.output)
    assert type(after) is type(before)
    assert after.config.model_type == model_type
    settings = [[layer_settings(layer) for layer in model.model.layers] for model in (before, after)]
    assert find_changed_setting(*settings, plan_of(made).sources) is None
    expected, logits = before(long_prompt()).logits, after(long_prompt()).logits
    assert torch.equal(logits, expected) if method in ("llama-pro", "opt-deus") else logits.isfinite().all()


@of_fused
def test_averages_of_norms_multiply_by_the_mean(model_type, make):
    made = make(model_type, "avg-deus")
    base, model, plan = load(made.base), load(made.output), plan_of(made)
    for index in plan.new_indices:
        sources = [base.model.layers[source] for source in plan.layers[index].sources]
        for name, module in model.model.layers[index].named_modules():
            originals = [source.get_submodule(name) for source in sources]
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                hidden = torch.randn(3, module.weight.shape[0], generator=torch.Generator().manual_seed(2))
                expected = sum(original(hidden) for original in originals) / 2
                assert torch.allclose(module(hidden), expected, rtol=1e-4, atol=1e-5), name
                continue
            for own, parameter in module.named_parameters(recurse=False):
                mean = sum(original.get_parameter(own).double() for original in originals) / 2
                assert torch.equal(parameter, mean.float()), f"{name}.{own}"
            for own, buffer in module.named_buffers(recurse=False):
                assert own == "layer_scalar" or torch.equal(buffer, originals[0].get_buffer(own)), f"{name}.{own}"


# Names of what LESA predicts.
MATRICES = {*"q_proj k_proj v_proj qkv_proj o_proj dense gate_proj up_proj down_proj".split()}
MATRICES |= {*"gate_up_proj fc1 fc2 c_fc c_proj".split()}


@of_fused
def test_lesa_predicts_only_matrices(model_type, make):
    made, plan = make(model_type, "lesa"), plan_of(make(model_type, "lesa"))
    old, new, trained = read_tensors(made.base), read_tensors(made.output), dict(load(made.base).named_parameters())
    for index in plan.new_indices:
        (following, previous), predicted = (layer_of(old, source) for source in plan.layers[index].sources), 0
        for name, tensor in layer_of(new, index).items():
            mean = ((previous[name].double() + following[name].double()) / 2).to(tensor.dtype)
            module = name.rpartition(".")[0]
            if tensor.dim() == 2 and not MATRICES.isdisjoint(module.split(".")):
                assert tensor.isfinite().all()
                assert not same_bits(tensor, mean)
                predicted += 1
            elif "." not in module and "norm" in module:
                assert same_bits(tensor, layer_of(old, 0)[name]), name
            elif tensor.dim() < 2:
                is_buffer = f"model.layers.0.{name}" not in trained
                assert same_bits(tensor, following[name] if is_buffer else mean), name
        assert predicted >= 4


EXPERTS = r"layer \d, whose feed-forward network is a mixture of experts; .* no counterparts in another"
# A config counts only dense layers before experts, and values may have another width than in the tiny model of the proof.
SIZES = {"deepseek_v3": {"first_k_dense_replace": 2}, "mimo_v2_flash": {"v_head_dim": 4, "head_dim": 8}}
# Type, words of the command, and what is said.
REFUSED = [
    ("mixtral", "avg-deus", EXPERTS),
    ("qwen3_5_text", "avg-deus", "layers 3 and 2, which differ in .*; expected .* Pass --set neighbours=same_type"),
    ("lfm2", "avg-deus", "expected layers of one kind. .* choose another placement. Or choose llama-pro or solar"),
    ("qwen3_5_text", "lesa", "layers 0 and 3, which differ in .*; expected layers of one kind. lesa learns from all layers"),
    ("persimmon", "opt-deus", r"no separate key that is known \(self_attn.query_key_value.weight stacks several projections\)"),
    ("youtu", "lesa", "has no separate key that is known; lesa needs it"),
    ("falcon_h1", "opt-deus", r"several matrices of the role output_projection \(mamba.out_proj.*, self_attn.o_proj.weight\)"),
    ("inkling2_text", "llama-pro", "has no separate down that is known; llama-pro fills it with zeros. Choose solar"),
    ("diffllama", "solar", "compute differently at another index .*: layer 3 has self_attn.lambda_init = 0.55"),
    ("jamba", "solar", "the layers of 'jamba' differ, and a new layer gets another kind than its source has"),
    ("mixtral", "hier-lora-ffn",
     r"'mixtral' does not support memory of type '\S+' at the site 'inside-ffn' \(proof .*\)\. Choose one of .*, ultramem-v2 \("),
    ("mimo_v2_flash", "hier-kv", r"no layer .* has the projections that hier-kv needs; expected key from 32 to 16, .* another"),
    ("qwen3_5_text", "hier-kv --set layers=[0]", r"layers is \[0\]; expected .* of the base that have the projections: 3\."),
    ("cohere", "moc --set chapters=8 --set k=2",
     r"'moc' at the site 'behind-attention' .*: layer 0 of class Cohere.* Pass --set site=behind-layer, or choose .*midus-hml"),
    ("minimax", "moc --set site=behind-layer --set chapters=8 --set k=2 --dry-run",
     r"at the site 'behind-layer' .*MiniMax uses cache of its own .*\. Choose one of .*, ultramem-v2 "),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "words", "message"), REFUSED)
def test_unsupported_type_and_method_are_refused(model_type, words, message, shared_base, command, tmp_path, refused):
    base = shared_base(model_type, **SIZES.get(model_type, {}))
    refused(command("--base", base, "--output", tmp_path / "out", "--method", *words.split()), message)


def test_fusion_of_different_layers_is_warned_of(shared_base, command, tmp_path):
    done = command("--base", shared_base("smollm3"), "--method", "avg-deus", "--output", tmp_path / "out")
    message = "new layer 4 fuses layers that the config describes differently .no_rope_layers 0, .* Pass neighbours=same_type"
    assert done.status == 0
    assert re.search(message, " ".join(done.err.split()))


def test_layer_reading_earlier_layers_cannot_move(shared_base, tmp_path):
    """On the whole model, since no setting of a layer shows what else the layer reads."""
    request = {"base": shared_base("zaya"), "method": "solar", "output": tmp_path / "out"}
    with pytest.raises(VerificationError, match=r"layer \d \(base \d.*\) computes differently than .* cannot move"):
        upscale(**request)
    assert not (tmp_path / "out").exists()
    assert upscale(**request, verify=False).num_layers == 6


FOLLOWING = [
    ("smollm3", "solar", None, {"no_rope_layers": [1, 1, 1, 1, 1, 0]}),
    ("deepseek_v3", "llama-pro", "0", {"first_k_dense_replace": 2}),
    ("deepseek_v3", "llama-pro", "2", {"first_k_dense_replace": 1}),
    ("ernie4_5_moe", "llama-pro", "0,5", {"moe_layer_start_index": 2, "moe_layer_end_index": 5}),
    ("bamba", "llama-pro", "0,5", {"attn_layer_indices": [4, 5]}),
    ("glm_moe_dsa", "llama-pro", "0", {"indexer_types": ["full"] * 5}),
]


@pytest.mark.parametrize(("model_type", "method", "placement", "expected"), FOLLOWING)
def test_per_layer_config_follows_the_layers(model_type, method, placement, expected, shared_base):
    config = config_of(shared_base(model_type))
    config.pop("no_rope_layers", None)  # which follow from the index where config.json does not list them
    assert upscaled_config(config, method, placement=placement).items() >= expected.items()


GAIN_OFFSETS = [
    *((model_type, "input_layernorm", 0.0) for model_type in ("ernie4_5", "starcoder2")),
    *((model_type, "input_layernorm", 1.0) for model_type in ("gemma", "qwen3_5_text")),
    *(("nemotron", "post_attention_layernorm", 1.0), ("qwen3_5_text", "linear_attn.norm", None)),
]


def test_norm_offset_is_read_from_its_output():
    for model_type, path, offset in GAIN_OFFSETS:
        norm = tiny_model(model_type).model.layers[0].get_submodule(path)
        before = {name: parameter.clone() for name, parameter in norm.named_parameters()}
        assert gain_offset(norm) == offset, (model_type, path)
        assert all(torch.equal(parameter, before[name]) for name, parameter in norm.named_parameters())


STACKED = {
    ("phi3", "self_attn.qkv_proj"): (("query", 32), ("key", 16), ("value", 16)),
    **dict.fromkeys(
        [("phi3", "mlp.gate_up_proj"), ("modernbert-decoder", "mlp.Wi"), ("moshi", "mlp.fc1")], (("gate", 48), ("up", 48))
    ),
    **dict.fromkeys(
        [("persimmon", "self_attn.query_key_value"), ("qwen3_5_text", "self_attn.q_proj"), ("minimax", "self_attn.qkv_proj")], ()
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "name"), STACKED)
def test_stacked_projections_are_read_in_their_order(model_type, name, shared_base):
    layers, weight = open_base(shared_base(model_type)).layout.backbone_layers, f"{name}.weight"
    stacked = [tensors[weight].parts for tensors in layers if weight in tensors]
    assert stacked
    assert all(parts == STACKED[model_type, name] for parts in stacked)


@pytest.mark.parametrize(("first", "expected"), [("gate", ("gate", "up")), ("up", ("up", "gate")), ("neither", ())])
def test_gate_may_be_either_half_of_a_projection(first, expected):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            gate, up = self.stacked(hidden).chunk(2, dim=-1)[:: 1 if first == "gate" else -1]
            return self.down(nn.functional.silu(gate) * (up.tanh() if first == "neither" else up))

    network = Network()
    assert gate_and_up(network, network.stacked, network.down) == expected


def test_stacked_projections_fuse_as_separate_ones(shared_base, tmp_path):
    """Split the projections of a Phi-3, as Llama has them, and compare the results of optimal transport."""
    stacked, apart, split = shared_base("phi3"), tmp_path / "apart", {}
    tiny_model("llama").save_pretrained(apart)
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def names_of(name):
        module = name.split(".")[-2]
        return [name.replace(module, part) for part in parts.get(module, (module,))]

    for name, tensor in read_tensors(stacked).items():
        rows = {3: [32, 16, 16], 2: [48, 48], 1: [len(tensor)]}[len(names_of(name))]
        split |= {part: values.clone() for part, values in zip(names_of(name), tensor.split(rows), strict=True)}
    assert split.keys() == read_tensors(apart).keys()
    write_tensors(apart, split)
    for base, output in ((stacked, "one"), (apart, "other")):
        upscale(base=base, method="opt-deus", output=tmp_path / output, options={"identity": "none"}, verify=False)
    one, other = (read_tensors(tmp_path / output) for output in ("one", "other"))
    assert all(torch.equal(value, torch.cat([other[part] for part in names_of(name)])) for name, value in one.items())


def test_stacked_projections_are_predicted_separately(shared_base, tmp_path):
    """Change the values of a base: nothing that is predicted of queries and keys may change."""
    changed = shutil.copytree(shared_base("phi3"), tmp_path / "changed")
    tensors, name = read_tensors(changed), "model.layers.2.self_attn.qkv_proj.weight"
    for each in (each for each in tensors if "qkv_proj" in each):
        tensors[each][48:] *= 2
    write_tensors(changed, tensors)
    for base, output in ((shared_base("phi3"), "one"), (changed, "other")):
        upscale(base=base, method="lesa", output=tmp_path / output, options=OPTIONS["lesa"], verify=False)
    one, other = (read_tensors(tmp_path / output)[name] for output in ("one", "other"))
    assert torch.equal(one[:48], other[:48])
    assert not torch.allclose(one[48:], other[48:])
