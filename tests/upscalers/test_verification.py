"""Verification: a method that lies is caught, and leaves nothing."""

import pytest
import torch

from tests.upscalers.checkpoints import SMALL, SMALL_MEMORY, load, logits, read_tensors, save_base, write_tensors
from upscalers import RequestError, VerificationError, upscale
from upscalers.engine.method import get_method
from upscalers.engine.recipes import Copy, Fill
from upscalers.methods.midus_hml import MidusHml


def upscaled(base, output, **request):
    return upscale(base=base, method="midus-hml", output=output, **{"options": SMALL_MEMORY, **request})


def replace_recipe(monkeypatch, name, make, method=MidusHml):
    """Make the method give another recipe for one tensor of each new layer."""
    honest = method.new_layer_recipes

    def recipes(self, base, layer, index, seed):
        given = honest(self, base, layer, index, seed)
        return {**given, name: make(base, given[name])}

    monkeypatch.setattr(method, "new_layer_recipes", recipes)


def put_nan(folder, name, index=0):
    tensors = read_tensors(folder)
    tensors[name].flatten()[index] = float("nan")
    write_tensors(folder, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("verify", "message"),
    [
        (True, r"the upscaled model's logits differ from the base's by up to [\d.e-]+; expected a difference of exactly 0"),
        (False, r"new layer 1 changes random hidden states by up to [\d.e-]+; expected no change at all"),
    ],
)  # fmt: skip
def test_values_that_are_not_zero_are_caught(family, tmp_path, monkeypatch, verify, message, dtype):
    base = save_base(tmp_path / "base", family, dtype)
    replace_recipe(monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, 0.05))
    with pytest.raises(VerificationError, match=message):
        upscaled(base, tmp_path / "out", verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("method", ["midus-pkm", "midus-linear"])
def test_so_are_those_of_other_memories(family, tmp_path, monkeypatch, verify, method):
    base = save_base(tmp_path / "base", family)
    replace_recipe(monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, 0.05), get_method(method))
    with pytest.raises(VerificationError, match=r"differ from the base's|changes random hidden states"):
        upscale(base=base, method=method, output=tmp_path / "out", options=SMALL[method], verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(("verify", "value"), [(True, 1e-6), (False, 1e-9)])
def test_a_change_too_small_for_any_tolerance_is_caught(tmp_path, monkeypatch, verify, value):
    base = save_base(tmp_path / "base")
    replace_recipe(monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, value))
    with pytest.raises(VerificationError):
        upscaled(base, tmp_path / "out", verify=verify)


def test_a_base_tensor_in_the_wrong_place_is_caught(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    honest = MidusHml.recipes

    def swapped(self, base, plan, seed):
        recipes = honest(self, base, plan, seed)
        source = "model.layers.0.mlp.up_proj.weight"
        recipes[2]["mlp.up_proj.weight"] = Copy(base.tensors[source].shape, source)
        return recipes

    monkeypatch.setattr(MidusHml, "recipes", swapped)
    with pytest.raises(VerificationError, match="logits differ"):
        upscaled(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_that_is_not_written_is_caught(tmp_path, monkeypatch, verify):
    base = save_base(tmp_path / "base")
    honest = MidusHml.new_layer_recipes

    def forgetful(self, base, layer, index, seed):
        recipes = honest(self, base, layer, index, seed)
        del recipes["memory.value_bank"]
        return recipes

    monkeypatch.setattr(MidusHml, "new_layer_recipes", forgetful)
    with pytest.raises(VerificationError, match="value_bank"):
        upscaled(base, tmp_path / "out", verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_method_that_promises_no_identity_reports_the_difference(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    replace_recipe(monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, 0.05))
    monkeypatch.setattr(MidusHml, "identity", False)
    report = upscaled(base, tmp_path / "out")
    assert report.identity.checked == "logits"
    assert report.identity.max_abs_diff > 0
    assert report.kl_divergence > 0
    assert not report.promises_identity
    assert "It is not promised to compute what the base computes" in (tmp_path / "out" / "README.md").read_text()
    unchecked = upscaled(base, tmp_path / "unchecked", verify=False)
    assert (unchecked.identity.checked, unchecked.identity.max_abs_diff) == (None, None)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_in_the_base_is_refused_by_name(tmp_path, name, dtype):
    base = save_base(tmp_path / "base", dtype=dtype)
    put_nan(base, name, index=-1)
    with pytest.raises(
        RequestError, match=f"{name} holds NaN; expected finite weights. Repair the base, or pass --allow-nan"
    ):
        upscaled(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_nan_is_found_wherever_it_stands_in_a_tensor_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("upscalers.engine.writer._CHUNK_ELEMENTS", 250)
    size = (
        save_base(tmp_path / "sound") and read_tensors(tmp_path / "sound")["model.layers.1.mlp.up_proj.weight"].numel()
    )
    for index in (0, size // 2, size - 1):
        base = save_base(tmp_path / f"base-{index}")
        put_nan(base, "model.layers.1.mlp.up_proj.weight", index)
        with pytest.raises(RequestError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
            upscaled(base, tmp_path / "out")


def test_nan_passes_where_it_is_allowed(family, tmp_path):
    base = save_base(tmp_path / "base", family)
    put_nan(base, "model.layers.2.mlp.down_proj.weight")
    upscaled(base, tmp_path / "out", allow_nan=True)
    old, new = logits(base), logits(tmp_path / "out")
    assert old.isnan().any()
    assert torch.equal(old.isnan(), new.isnan())


def test_without_verification_the_base_is_not_searched_for_nan(tmp_path):
    base = save_base(tmp_path / "base")
    put_nan(base, "model.layers.2.mlp.down_proj.weight")
    report = upscaled(base, tmp_path / "out", verify=False)
    assert report.identity.checked == "blocks"


def test_a_block_check_names_nan_that_comes_from_the_base(tmp_path):
    base = save_base(tmp_path / "base")
    put_nan(base, "model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(VerificationError, match="new layer 1 gives NaN: what it takes from the base holds NaN"):
        upscaled(base, tmp_path / "out", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("verify", [True, False])
def test_infinite_weights_that_matter_are_never_passed_over(tmp_path, verify):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.layers.1.self_attn.v_proj.weight"][:] = float("inf")
    write_tensors(base, tensors)
    try:
        upscaled(base, tmp_path / "out", verify=verify)
    except VerificationError:
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    else:
        old, new = logits(base), logits(tmp_path / "out")
        assert ((old == new) | (old.isnan() & new.isnan())).all()


def test_verification_leaves_the_global_random_state_alone(base, tmp_path):
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    upscaled(base, tmp_path / "out")
    assert torch.equal(torch.randn(3), expected)
    assert load(tmp_path / "out").config.num_hidden_layers == 6
