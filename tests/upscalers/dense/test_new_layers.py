"""What new layers of dense methods are made of, and how they begin as the identity."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import WINDOW, prompt

from midus_hf.config.yaml_options import read_mapping
from tests.upscalers.checkpoints import SMALL, Recorder, save_base, write_tensors
from tests.upscalers.contents import layer, load, logits, read_tensors, same_bits
from tests.upscalers.methods import (
    OUTPUT_NORMS,
    PROMISING,
    REQUESTS,
    planned,
    tiny_config,
    upscaled,
    upscaled_config,
)
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.methods import contract
from upscalers.methods.contract import METHODS, register_method
from upscalers.methods.dense_block import DenseMethod
from upscalers.plan import place
from upscalers.request import Request, parse_options
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Combine

SOURCES = [
    ("llama-pro", "llama-pro", [(3,), (7,), (11,), (15,)]), ("llama-pro", "0,1,9,19", [(0,), (0,), (6,), (15,)]),
    ("avg-deus", "top-heavy", [(12, 11), (13, 12), (14, 13), (15, 14)]), ("avg-deus", "3,4,12", [(3, 2), (3, 2), (10, 9)]),
]  # fmt: skip


@pytest.mark.parametrize(("method", "placement", "sources"), SOURCES)
def test_new_layers_have_the_documented_sources(method, placement, sources):
    result = planned(tiny_config("llama", num_hidden_layers=16), method, len(sources), placement)
    assert [result.layers[index].sources for index in result.new_indices] == sources


def test_llama_pro_copies_all_but_the_zeroed_tensors(native_family, shared_base, tmp_path):
    base, has_norms = shared_base(native_family), native_family in OUTPUT_NORMS
    upscaled(base, tmp_path / "out", "llama-pro")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    zeroed = GAINS if has_norms else PROJECTIONS
    for index, source in enumerate([0, 1, 1, 2, 3, 3]):
        actual, expected = layer(new, index), layer(old, source)
        assert actual.keys() == expected.keys(), index
        changed = {name for name in actual if not same_bits(actual[name], expected[name])}
        assert changed == ({f"{name}.weight" for name in zeroed} if index in (2, 5) else set())
        value = -1 if native_family.startswith("gemma") else 0
        assert all((actual[name] == value).all() for name in changed), index


S, F = "sliding_attention", "full_attention"
# Bases of six layers, with the types that transformers would derive from their other values.
WITH_TYPES = {
    "gemma3": {"num_hidden_layers": 6, "layer_types": [S, S, F, S, S, F]},
    "gemma2": {"num_hidden_layers": 6, "layer_types": [S, F, S, F, S, F]},
    "qwen2": {"num_hidden_layers": 6, "max_window_layers": 3, "layer_types": [F, F, F, S, S, S]},
}
# What older files say instead of listing the types.
DERIVED_FROM = {"gemma3": {"sliding_window_pattern": 3}}
TYPES_OF_RESULTS = {
    ("gemma3", "solar"): [S, S, F, S, S, S, F, S, S, F], ("gemma3", "llama-pro"): [S, S, S, F, S, S, S, F, F, F],
    ("gemma3", "avg-deus"): [S, S, F, F, S, S, S, S, F, F], ("gemma2", "avg-deus"): [S, F, S, S, F, F, S, S, F, F],
    ("qwen2", "llama-pro"): [F, F, F, F, S, S, S, S, S, S],
}  # fmt: skip
PLACED_AT = {
    "solar": {"num_new_layers": 4}, "llama-pro": {"placement": "2,5,8,9"}, "avg-deus": {"placement": "2,4,6,8"},
}  # fmt: skip


@pytest.mark.parametrize("implied", [False, True])
@pytest.mark.parametrize(("family", "method"), TYPES_OF_RESULTS)
def test_config_lists_layer_types_even_if_implied(family, method, implied):
    config = tiny_config(family, **WITH_TYPES[family])
    if implied:
        del config["layer_types"]
        config |= DERIVED_FROM.get(family, {})
    assert upscaled_config(config, method, **PLACED_AT[method])["layer_types"] == TYPES_OF_RESULTS[family, method]


def test_same_type_neighbour_is_an_earlier_layer():
    config, options = tiny_config("gemma3", **WITH_TYPES["gemma3"]), {"neighbours": "same_type"}
    plan = planned(config, "avg-deus", None, "3,5,7", **options)
    assert [plan.layers[index].sources for index in plan.new_indices] == [(3, 1), (4, 3), (5, 2)]
    result = upscaled_config(config, "avg-deus", placement="3,5,7", options=options)
    assert result["layer_types"] == [S, S, F, S, S, S, S, F, F]
    plan = planned(tiny_config("llama", num_hidden_layers=6), "avg-deus", 3, **options)
    assert [plan.layers[index].sources for index in plan.new_indices] == [(3, 2), (4, 3), (5, 4)]


@pytest.mark.parametrize("method", ["avg-deus", "lesa", "opt-deus"])
def test_fusing_both_attention_types_is_warned_of(method, tmp_path):
    base = save_base(tmp_path / "base", "gemma3", **WITH_TYPES["gemma3"])
    for placement, options, fusing in (
        ("3,5,7", {}, "new layers 3, 7 fuse sliding and full attention, .* Pass neighbours=same_type"),
        ("3,5,7", {"neighbours": "same_type"}, None),
        ("4,6", {}, "new layer 6 fuses sliding and full attention, .* Pass neighbours=same_type"),
        ("1,5", {}, None),
    ):
        progress = Recorder()
        upscaled(base, None, method, placement=placement, options=options, progress=progress, dry_run=True)
        warned = [warning for warning in progress.warnings if " fuse" in warning]
        assert len(warned) == (fusing is not None)
        assert all(re.match(fusing, warning) for warning in warned)


BY_THREE = {"num_hidden_layers": 12, "sliding_window_pattern": 3}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3, "num_hidden_layers": 6}


@pytest.mark.parametrize(("family", "changes", "method", "moved"), [
    ("gemma3", BY_THREE, "llama-pro", "8 of 18 layers .* gemma3_text"),
    ("gemma2", {"num_hidden_layers": 5}, "solar", "4 of 8 layers .* gemma2"),
    ("qwen2", WINDOWED, "solar", "2 of 10 layers .* qwen2"),
    ("gemma2", {"num_hidden_layers": 5}, "midus-hml", None),
    ("gemma2", {"layer_types": [F, S, S, S]}, "llama-pro", None),
])  # fmt: skip
def test_index_that_no_longer_implies_types_is_warned_of(family, changes, method, moved, tmp_path):
    """A runtime that goes by the index reads no memory, and misreads other types already."""
    progress, base = Recorder(), save_base(tmp_path / "base", family, **changes)
    upscale(base=base, method=method, options=SMALL.get(method, {}), progress=progress, dry_run=True)
    warned = [warning for warning in progress.warnings if "another attention type" in warning]
    assert len(warned) == (moved is not None)
    assert not moved or re.match(rf"{moved} implies by their index\. .* \(see docs/export\.md\)\.$", warned[0])


RECIPES = Path(__file__).parents[3] / "configs" / "upscale"
# Of hierarchical memories `tests/training/test_recipes.py` has the recipes.
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("hier-"))


@pytest.mark.parametrize("name", NAMES)
def test_recipes_add_half_as_many_layers(name, tmp_path):
    recipe = read_mapping(RECIPES / f"{name}.yaml")
    parse_options(Request, {"base": "a folder", **recipe}, name)
    if name == "demo":
        assert "base" not in recipe
        assert "output" not in recipe
        return
    assert (recipe["base"], recipe["method"]) == ("meta-llama/Llama-3.2-1B", name)
    report = upscale(**{**recipe, "base": write_config(tmp_path / "base", LLAMA_3_2_1B), "dry_run": True})
    placement = "top-heavy" if name.endswith("-deus") else "distributed"
    assert report.new_layer_indices == place(placement, 16, 8)
    assert report.promises_identity == (name != "avg-deus")


def coarsen(tensor):
    """Round to multiples of 2**-9, so that means of two are exact in float32."""
    return ((tensor.double() * 512).round() / 512).to(tensor.dtype)


@pytest.mark.parametrize(("family", "stored", "dtype"), [
    ("llama", torch.float32, "auto"),
    ("gemma3", torch.bfloat16, "auto"),
    ("olmo2", torch.float16, "auto"),
    ("llama", torch.float64, "float32"),
    ("llama", torch.float64, "bfloat16"),
], ids=str)  # fmt: skip
def test_mean_is_rounded_once(family, stored, dtype, tmp_path):
    base = save_base(tmp_path / "base", family, stored)
    change = fine if stored == torch.float64 else coarsen
    write_tensors(base, {name: change(tensor) for name, tensor in read_tensors(base).items()})
    upscaled(base, tmp_path / "out", "avg-deus", dtype=dtype)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, source in ((2, 1), (4, 2)):
        previous, following = layer(old, source), layer(old, source + 1)
        assert layer(new, index).keys() == previous.keys()
        for name, tensor in layer(new, index).items():
            mean = (previous[name].double() + following[name].double()) / 2
            assert torch.equal(tensor, mean.to(stored if dtype == "auto" else getattr(torch, dtype))), name


@pytest.mark.parametrize("method", ["avg-deus", "llama-pro"])
def test_new_layers_have_the_dtype_of_their_sources(method, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    mixed = {name: t.float() + 2**-12 if "norm" in name else t for name, t in read_tensors(base).items()}
    write_tensors(base, mixed)
    report, new = upscaled(base, tmp_path / "out", method), read_tensors(tmp_path / "out")
    for index in report.new_layer_indices:
        assert {n: t.dtype for n, t in layer(new, index).items()} == {n: t.dtype for n, t in layer(mixed, 0).items()}


def fine(tensor):
    """A float64 tensor that float32 cannot hold."""
    tensor = tensor * (1 + 1e-11)
    assert not torch.equal(tensor, tensor.float().double())
    return tensor


@pytest.mark.parametrize("method", REQUESTS)
def test_dense_methods_keep_float64(method, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.float64)
    write_tensors(base, {name: fine(tensor) for name, tensor in read_tensors(base).items()})
    upscaled(base, tmp_path / "out", method, verify=True)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    assert all(tensor.dtype == torch.float64 for tensor in new.values())
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        assert torch.equal(new[name], old[name])
    if method != "lesa":  # which predicts in float32
        assert not any(torch.equal(tensor, tensor.float().double()) for tensor in new.values() if tensor.any())


def test_combine_computes_in_the_finest_dtype():
    sources = {"coarse": torch.tensor([1.0, 2.0]), "fine": torch.tensor([1e-12, 2e-12], dtype=torch.float64)}
    exact = sources["coarse"].double() + sources["fine"]
    for names in (("coarse", "fine"), ("fine", "coarse")):
        made = Combine((2,), tuple((name, 1.0) for name in names)).combine(*(sources[name] for name in names))
        assert torch.equal(made, exact), names
    narrow = Combine((2,), (("coarse", 0.1),)).combine(sources["coarse"].bfloat16())
    assert narrow.dtype == torch.float32


PROJECTIONS = {"self_attn.o_proj", "mlp.down_proj"}
# What is zero at first in families without and with norms after them, and only that has a gradient in the first step.
GAINS = {"post_attention_layernorm", "post_feedforward_layernorm"}
# What one step of AdamW with learning rate 1e-4 from zero gains may change in a logit; measured are 4e-5 to 4e-4.
LARGEST_STEP = 1e-2


def new_model(base, output, method: str, **options):
    upscaled(base, output, method, options=options)
    model = load(output)
    return model, [model.model.layers[index] for index in model.config.upscale["new_layers"]]


def backward(model) -> None:
    model.zero_grad()
    model(prompt(), labels=prompt()).loss.backward()


def with_gradient(block) -> set[str]:
    assert all(parameter.grad is not None for parameter in block.parameters())
    return {name for name, parameter in block.named_parameters() if parameter.grad.any()}


@pytest.mark.parametrize("method", PROMISING)
def test_first_step_trains_only_what_makes_the_identity(native_family, method, shared_base, tmp_path):
    # Other tests make the identity of every family by `auto`.
    identity, first = ("zero_out_norm", GAINS) if native_family in OUTPUT_NORMS else ("auto", PROJECTIONS)
    base = shared_base(native_family)
    model, blocks = new_model(base, tmp_path / "out", method, identity=identity)
    before = logits(base)
    assert torch.equal(before, logits(tmp_path / "out"))
    assert model.config.upscale["options"]["identity"] == identity
    backward(model)
    assert all(with_gradient(block) == {f"{name}.weight" for name in first} for block in blocks)
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0).step()
    change = (model(prompt()).logits - before).abs().max()
    assert change > 0
    assert native_family not in OUTPUT_NORMS or change < LARGEST_STEP
    backward(model)
    assert all(with_gradient(block) == {name for name, _ in block.named_parameters()} for block in blocks)


@pytest.mark.parametrize(("method", "tied"), [(method, bool(number % 2)) for number, method in enumerate(PROMISING)])
def test_biases_of_zero_projections_are_zero_and_train(method, tied, tmp_path):
    base = save_base(tmp_path / "base", attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    model, blocks = new_model(base, tmp_path / "out", method, identity="auto")
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    backward(model)
    zeroed = {f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")}
    assert all(with_gradient(block) == zeroed for block in blocks)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_method_without_options_copies_and_keeps_identity(family, shared_base, tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "METHODS", {**METHODS})

    @register_method("copies")
    class Copies(DenseMethod):
        summary = "copies"
        paper = None
        identity = True

        def surgery(self, base, plan, seed):
            return replace(super().surgery(base, plan, seed), warnings=("copies repeat",))

    base, progress = shared_base(family), Recorder()
    report = upscale(base=base, method="copies", output=tmp_path / "out", placement=[2, 5], progress=progress)
    assert "copies repeat" in progress.warnings
    assert report.promises_identity
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    old, new, name = read_tensors(base), read_tensors(tmp_path / "out"), "model.layers.{}.self_attn.q_proj.weight"
    for index, source in {2: 2, 3: 2, 5: 3}.items():
        assert torch.equal(new[name.format(index)], old[name.format(source)])


def test_every_dense_method_has_a_request():
    dense = {name for name, method in METHODS.items() if issubclass(method, DenseMethod)}
    assert set(REQUESTS) == dense
