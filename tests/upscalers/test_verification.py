"""Verification: a method that lies is caught, and leaves nothing."""

import math
import re

import pytest
import torch
from pairs import in_turn

from midus_hf.memory.headwise import HeadwiseMemory
from tests.upscalers.checkpoints import (
    SMALL,
    logits,
    read_tensors,
    record_of,
    save_base,
    with_memory,
    write_tensors,
)
from tests.upscalers.solvers.recording import Recorder
from upscalers.methods.contract import get_method
from upscalers.methods.midus import MidusHml
from upscalers.request.errors import RequestError, VerificationError
from upscalers.runs import job, streamed_model
from upscalers.runs.upscale import upscale
from upscalers.runs.writing import Writing
from upscalers.tensors.recipes import Fill


def replace_recipe(monkeypatch, name, make, method=MidusHml):
    """Make the method give another recipe for one tensor of each new layer."""
    honest = method.new_layer_recipes

    def recipes(self, base, layer, index, seed):
        given = honest(self, base, layer, index, seed)
        return {**given, name: make(base, given[name])}

    monkeypatch.setattr(method, "new_layer_recipes", recipes)


def put_nan(folder, name, index=0, value=math.nan):
    tensors = read_tensors(folder)
    tensors[name].flatten()[index] = value
    write_tensors(folder, tensors)


@pytest.mark.parametrize(("method", "dtype"), in_turn(SMALL, [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize(
    ("verify", "small", "message"),
    [
        (True, 1e-6, r"the upscaled model's logits differ from the base's by up to [\d.e-]+; expected a difference of exactly 0"),
        (False, 1e-9, r"new layer 1 changes random hidden states by up to [\d.e-]+; expected no change at all"),
    ],
)  # fmt: skip
def test_values_that_are_not_zero_are_caught_even_if_too_small_for_any_tolerance(
    family, tmp_path, monkeypatch, verify, small, message, dtype, method
):
    base = save_base(tmp_path / "base", family, dtype)
    value = small if dtype == torch.float32 and method == "midus-hml" else 0.05
    replace_recipe(
        monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, value), get_method(method)
    )
    with pytest.raises(VerificationError, match=message):
        upscale(base=base, method=method, output=tmp_path / "out", options=SMALL[method], verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def change_written(monkeypatch, name, change=lambda tensor: tensor + 1e-3):
    """Let a tensor of the result be another one than the method asked for."""
    honest = Writing._write_siblings

    def write_siblings(self, partial, config):
        tensors = read_tensors(partial)
        write_tensors(partial, {**tensors, name: change(tensors[name])})
        return honest(self, partial, config)

    monkeypatch.setattr(Writing, "_write_siblings", write_siblings)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", "in the embedding: {} is not what the base has"),
        ("model.layers.0.self_attn.v_proj.weight", "in layer 0 (base 0): {} is not what the base has"),
        ("model.layers.3.mlp.down_proj.weight", "in layer 3 (base 2): {} is not what the base has"),
        ("model.layers.4.memory.value_bank", "in layer 4 (new, between base 2 and base 3, made from 3)"),
        ("model.layers.5.post_attention_layernorm.weight", "in layer 5 (base 3): {} is not what the base has"),
        ("model.norm.weight", "behind the last layer: {} is not what the base has"),
        ("lm_head.weight", "behind the last layer: {} is not what the base has"),
    ],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_wrong_tensor_of_the_result_is_found_and_named(tmp_path, monkeypatch, name, place, prefix):
    base = save_base(tmp_path / "base", prefix=prefix)
    if not prefix:
        name = name.removeprefix("model.")
    change_written(monkeypatch, name)
    expected = f"expected a difference of exactly 0. They part {place.format(name)}."
    with pytest.raises(VerificationError, match=rf"differ from the base's by up to [\d.e-]+; {re.escape(expected)}$"):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_layer_that_computes_otherwise_with_the_bases_tensors_is_named(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base", "qwen2")
    honest = MidusHml.config

    def without_window(self, base, plan):
        config = honest(self, base, plan)
        return {**config, "layer_types": [*config["layer_types"][:-1], "full_attention"]}

    monkeypatch.setattr(MidusHml, "config", without_window)
    with pytest.raises(VerificationError, match=r"They part in layer 5 \(base 3\), though its tensors are the base's"):
        with_memory(base, tmp_path / "out")


def test_hidden_states_are_compared_too_where_no_logit_tells(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    write_tensors(base, {**tensors, "lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])})
    change_written(monkeypatch, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(VerificationError, match=r"hidden states differ .* They part in layer 2 \(base 1\): model"):
        with_memory(base, tmp_path / "out")


def test_without_enough_memory_blocks_are_checked_and_this_is_said(base, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "available_bytes", lambda: 123_000_000)
    told = Recorder()
    report = with_memory(base, tmp_path / "out", progress=told)
    assert report.identity.checked == "blocks"
    (warning,) = told.warnings
    expected = (
        r"comparing both models layer by layer takes 0\.20 GB of memory, but 0\.12 GB is free; each new block is checked "
        r"alone instead, as with --no-verify\. Make room and pass --verify to insist\."
    )
    assert re.fullmatch(expected, warning)
    unchecked = Recorder()
    report = upscale(base=base, method="solar", output=tmp_path / "solar", progress=unchecked)
    assert report.identity.checked is None
    assert "0.12 GB is free; nothing is compared, since the method promises no identity." in unchecked.warnings[0]


def test_who_insists_is_refused_before_the_first_byte(command, base, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "available_bytes", lambda: 123_000_000)
    monkeypatch.setattr(Writing, "run", lambda *_: pytest.fail("the work began"))
    refused = command("--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--verify")
    assert refused.status == 2
    assert refused.err == (
        "upscale: comparing both models layer by layer takes 0.20 GB of memory, but 0.12 GB is free. Make room, or leave "
        "--verify out to check what the memory allows.\n"
    )
    assert not list(tmp_path.iterdir())


def test_memory_that_runs_out_after_all_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    honest = streamed_model.read_tensor

    def read_tensor(place):
        if any(part.startswith(".out") for part in place.file.parts):
            raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")
        return honest(place)

    monkeypatch.setattr(streamed_model, "read_tensor", read_tensor)
    message = r"cannot run the upscaled model \(RuntimeError: can't allocate .* pass --no-verify\."
    with pytest.raises(VerificationError, match=message):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_memory_that_suffices_is_no_reason_to_ask(base, tmp_path, monkeypatch):
    for verify in (None, True):
        told = Recorder()
        report = with_memory(base, tmp_path / str(verify), verify=verify, progress=told)
        assert (report.identity.checked, told.warnings) == ("logits", [])
    monkeypatch.setattr(job, "available_bytes", lambda: pytest.fail("nobody wants logits"))
    assert with_memory(base, tmp_path / "blocks", verify=False).identity.checked == "blocks"


@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_that_is_not_written_is_caught(tmp_path, monkeypatch, verify):
    """Should the check of recipes let it pass."""
    monkeypatch.setattr(job, "check_recipes", lambda *_: None)
    base = save_base(tmp_path / "base")
    honest = MidusHml.new_layer_recipes

    def forgetful(self, base, layer, index, seed):
        recipes = honest(self, base, layer, index, seed)
        del recipes["memory.value_bank"]
        return recipes

    monkeypatch.setattr(MidusHml, "new_layer_recipes", forgetful)
    with pytest.raises(VerificationError, match="value_bank"):
        with_memory(base, tmp_path / "out", verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_method_that_promises_no_identity_reports_the_difference(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    replace_recipe(monkeypatch, "memory.value_bank", lambda base, recipe: Fill(recipe.shape, 0.05))
    monkeypatch.setattr(MidusHml, "identity", False)
    report = with_memory(base, tmp_path / "out")
    assert report.identity.checked == "logits"
    assert report.identity.max_abs_diff > 0
    assert report.kl_divergence > 0
    assert not report.promises_identity
    assert "It is not promised to compute what the base computes" in (tmp_path / "out" / "README.md").read_text()
    unchecked = with_memory(base, tmp_path / "unchecked", verify=False)
    assert (unchecked.identity.checked, unchecked.identity.max_abs_diff) == (None, None)


@pytest.mark.parametrize(
    ("value", "dtype"),
    in_turn([math.nan, math.inf, -math.inf], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "share"), [("model.embed_tokens", 0.5), ("model.layers.2.mlp.down_proj", 0), ("lm_head", 1)]
)
def test_what_is_not_finite_in_the_base_is_refused_by_name_wherever_it_stands(
    tmp_path, monkeypatch, value, dtype, name, share
):
    """Tensors are read in pieces."""
    monkeypatch.setattr("upscalers.tensors.writer._CHUNK_ELEMENTS", 250)
    base, name = save_base(tmp_path / "base", dtype=dtype), f"{name}.weight"
    put_nan(base, name, int(share * (read_tensors(base)[name].numel() - 1)), value)
    what = "NaN" if math.isnan(value) else "infinite values"
    message = f"{name} holds {what}; expected finite weights. Repair the base, or pass --allow-nan"
    with pytest.raises(RequestError, match=message):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    ("verify", "ending"),
    [
        (True, "Mend the memory."),
        (False, "Its layer was run alone, on random hidden states without token ids; where it needs a whole model, pass --verify. "
         "Otherwise mend the memory."),
    ],
)  # fmt: skip
def test_a_memory_that_raises_is_named_and_not_the_config(base, tmp_path, monkeypatch, verify, ending):
    def forward(self, attention_output, residual, **options):
        raise KeyError("input_ids")

    monkeypatch.setattr(HeadwiseMemory, "forward", forward)
    with pytest.raises(VerificationError) as raised:
        with_memory(base, tmp_path / "out", verify=verify)
    assert str(raised.value) == (
        "the memory of type 'headwise' (midus_hf.memory.headwise.HeadwiseMemory) raised KeyError: 'input_ids'. "
        + ending
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_both_sides_of_the_comparison_are_named_with_their_dtypes(command, tmp_path, verify):
    base = save_base(tmp_path / "base")
    for dtype, sides in (
        ("auto", "base and result in float32"),
        ("bfloat16", "base rounded from float32 to bfloat16, result in bfloat16"),
    ):
        words = (
            "--method",
            "midus-hml",
            "--set",
            "n=8",
            "--set",
            "k=2",
            "--dtype",
            dtype,
            "--verify" if verify else "--no-verify",
        )
        done = command("--base", base, "--output", tmp_path / dtype, *words)
        checked = "logits" if verify else "blocks"
        assert f"{checked}: largest difference 0 ({sides})" in " ".join(done.out.split())
        assert record_of(tmp_path / dtype)["identity"] == {"checked": checked, "max_abs_diff": 0.0, "compared": sides}


def test_nan_passes_where_it_is_allowed(family, tmp_path):
    base = save_base(tmp_path / "base", family)
    put_nan(base, "model.layers.2.mlp.down_proj.weight")
    with_memory(base, tmp_path / "out", allow_nan=True)
    old, new = logits(base), logits(tmp_path / "out")
    assert old.isnan().any()
    assert torch.equal(old.isnan(), new.isnan())


def test_without_verification_the_base_is_not_searched_for_nan(tmp_path):
    base = save_base(tmp_path / "base")
    put_nan(base, "model.layers.2.mlp.down_proj.weight")
    report = with_memory(base, tmp_path / "out", verify=False)
    assert report.identity.checked == "blocks"


def test_a_block_check_names_nan_that_comes_from_the_base(tmp_path):
    base = save_base(tmp_path / "base")
    put_nan(base, "model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(VerificationError, match="new layer 1 gives NaN: what it takes from the base holds NaN"):
        with_memory(base, tmp_path / "out", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    "request_", [{"verify": True, "allow_nan": True}, {"verify": False}], ids=["allowed", "blocks"]
)
def test_infinite_weights_that_matter_are_never_passed_over(tmp_path, request_):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.layers.1.self_attn.v_proj.weight"][:] = float("inf")
    write_tensors(base, tensors)
    try:
        with_memory(base, tmp_path / "out", **request_)
    except VerificationError:
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    else:
        old, new = logits(base), logits(tmp_path / "out")
        assert ((old == new) | (old.isnan() & new.isnan())).all()
