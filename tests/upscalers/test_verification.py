"""Verification: a method that lies is caught, by its recipes before a byte is written or by its result, and leaves nothing."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.upscalers.checkpoints import edit_config, read_tensors, record_of, save_base, with_memory, write_tensors
from upscalers.methods.contract import get_method
from upscalers.methods.midus import MidusHml
from upscalers.plan.plan import Base, Plan
from upscalers.request import MethodError, VerificationError
from upscalers.runs import verify, writing
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Copy, Fill, Recipe


def change_written(monkeypatch, name, change=lambda tensor: tensor + 1e-3):
    """Let a tensor of the result be another one than the method asked for."""
    honest = writing.keep_tokenizer

    def keep_tokenizer(source, partial, progress):
        tensors = read_tensors(partial)
        write_tensors(partial, {**tensors, name: change(tensors[name])})
        return honest(source, partial, progress)

    monkeypatch.setattr(writing, "keep_tokenizer", keep_tokenizer)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embed_tokens.weight", "in the embedding"),
        ("layers.3.mlp.down_proj.weight", "in layer 3 (base 2)"),
        ("layers.4.memory.value_bank", "in layer 4 (new, between base 2 and base 3, made from 3)"),
        ("norm.weight", "after the last layer"),
    ],
)
def test_message_names_the_first_difference(tmp_path, monkeypatch, name, place):
    base = save_base(tmp_path / "base", prefix="")
    change_written(monkeypatch, name)
    expected = rf"by up to [\d.e-]+; expected a difference of exactly 0. They first differ {re.escape(place)}\.$"
    with pytest.raises(VerificationError, match=expected):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_hidden_states_are_compared_too(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    write_tensors(base, {**tensors, "lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])})
    change_written(monkeypatch, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(VerificationError, match=r"hidden states differ .* They first differ in layer 2 \(base 1\)"):
        with_memory(base, tmp_path / "out")


def test_out_of_memory_names_no_verify_and_leaves_nothing(base, tmp_path, monkeypatch):
    honest = verify.read_tensor

    def read_tensor(position):
        if any(part.startswith(".out") for part in position.file.parts):
            raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")
        return honest(position)

    monkeypatch.setattr(verify, "read_tensor", read_tensor)
    message = r"cannot run the upscaled model \(RuntimeError: can't allocate .* pass --no-verify\."
    with pytest.raises(VerificationError, match=message):
        with_memory(base, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "dtype", "name", "share"),
    [
        (math.nan, torch.float32, "model.embed_tokens", 0.5),
        (math.inf, torch.bfloat16, "model.layers.2.mlp.down_proj", 0),
        (-math.inf, torch.float16, "lm_head", 1),
        (math.nan, torch.bfloat16, "lm_head", 1),
        (math.inf, torch.float32, "lm_head", 0),
    ],
    ids=str,
)
def test_non_finite_base_is_refused_unless_unverified(tmp_path, monkeypatch, value, dtype, name, share):
    """Tensors are read in pieces."""
    monkeypatch.setattr("upscalers.tensors.writer._CHUNK_ELEMENTS", 250)
    base, name = save_base(tmp_path / "base", dtype=dtype), f"{name}.weight"
    tensors = read_tensors(base)
    tensors[name].flatten()[int(share * (tensors[name].numel() - 1))] = value
    write_tensors(base, tensors)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite .* Repair the base, or pass --no-verify"):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert with_memory(base, tmp_path / "out", verify=False).identity.checked is None


def test_identity_names_both_dtypes(command, base, tmp_path):
    for dtype, sides, same in (
        ("auto", "base and result in float32", "the same as the base."),
        ("bfloat16", "base rounded from float32 to bfloat16, result in bfloat16", "the same as the base in bfloat16."),
    ):
        words = ("--method", "midus-hml", "--set", "n=8", "--set", "k=2", "--dtype", dtype)
        done = command("--base", base, "--output", tmp_path / dtype, *words)
        assert f"logits: largest difference 0 ({sides})" in " ".join(done.out.split())
        assert record_of(tmp_path / dtype)["identity"] == {"checked": "logits", "max_abs_diff": 0.0, "compared": sides}
        assert f"Before any training it computes exactly {same}" in (tmp_path / dtype / "README.md").read_text()


PROMISED = "it computes exactly the same as the base, as the method promises; nothing was compared."
NOT_PROMISED = "before that it is not guaranteed to compute the same as the base; nothing was compared."


def overflow(base, part):
    """Let a row or a whole head of a float16 model overflow, whose weights are finite."""
    tensors = read_tensors(base)
    tensors["model.norm.weight"].fill_(1_000)
    tensors["lm_head.weight"][0 if part == "row" else slice(None)] = 60_000
    write_tensors(base, tensors)


@pytest.mark.parametrize(
    ("method", "start", "overflows"), [("midus-hml", PROMISED, True), ("solar", NOT_PROMISED, False)]
)
def test_card_and_report_say_that_nothing_was_compared(command, tmp_path, overflows, method, start):
    base = save_base(tmp_path / "base", "llama" if overflows else "gemma3", dtype=torch.float16)
    words = ("--base", base, "--method", method, "--output", tmp_path / "out")
    if overflows:
        overflow(base, "head")
    else:  # transformers makes this model and cannot run it
        edit_config(base, query_pre_attn_scalar=-16)
        assert command(*words).status != 0
        words = (*words, "--no-verify")
    done = command(*words)
    promise = "promised" if start == PROMISED else "not promised"
    assert done.status == 0
    assert f"identity {promise} by the method; nothing was compared" in " ".join(done.out.split())
    assert ("every logit of the base is NaN or infinite, so nothing was compared" in done.err) == overflows
    record = record_of(tmp_path / "out")
    assert [*record["identity"].values(), record["kl_divergence"]] == [None] * 4
    assert f"{start}\n" in (tmp_path / "out" / "README.md").read_text()


def test_divergence_leaves_out_non_finite_logits(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.float16)
    overflow(base, "row")
    report = upscale(base=base, method="solar", output=tmp_path / "out")
    assert 0 < report.identity.max_abs_diff < math.inf and report.kl_divergence is None
    json.loads((tmp_path / "out" / "upscale.json").read_text(), parse_constant=pytest.fail)


def test_non_finite_result_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(MidusHml, "identity", False)
    change_written(monkeypatch, "model.layers.1.memory.value_bank", lambda tensor: tensor + math.inf)
    with pytest.raises(VerificationError, match=r"NaN or infinite where .* finite; .* another --dtype or method"):
        with_memory(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


Layers = list[dict[str, Recipe]]

KEY = "self_attn.k_proj.weight"


def copied(name: str, layer: int) -> Callable[[Layers], None]:
    return lambda layers: layers[2].update({KEY: Copy((16, 32), f"model.layers.{layer}.{name}.weight")})


FAULTS: dict[str, tuple[Callable[[Layers], Any], str]] = {
    "tensors left out": (
        lambda layers: layers[2].clear(), r"layer 2: there is no recipe for self_attn.q_proj.weight, .* and 5 more; expected one",
    ),
    "a layer left out": (lambda layers: layers.pop(), r"recipes for this many layers: \d+; expected \d+, as many as its plan"),
    "an unknown name": (
        lambda layers: layers[2].update({"mlp.up_projection.weight": Fill((48, 32), 1.0)}),
        "layer 2: there is a recipe for mlp.up_projection.weight; expected none except for self_attn.q_proj.weight, ",
    ),
    "a wrong shape": (
        lambda layers: layers[2].update({KEY: dataclasses.replace(layers[2][KEY], shape=(32, 16))}),
        rf"layer 2: {KEY} is \[32, 16\]; expected \[16, 32\]",
    ),
    "a source of a wrong shape": (copied("self_attn.q_proj", 0), rf"{KEY} is made from .*, which is \[32, 32\]; expected \[16, 32\]"),
    "a missing source": (copied("self_attn.k_proj", 9), rf"{KEY} is made from .*; expected a tensor of the base"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_method_with_wrong_recipes_writes_nothing(name, base, tmp_path, monkeypatch):
    fault, message = FAULTS[name]
    sound = get_method("llama-pro").recipes

    def recipes(self, base, plan, seed) -> Layers:
        layers = [dict(layer) for layer in sound(self, base, plan, seed)]
        fault(layers)
        return layers

    monkeypatch.setattr(get_method("llama-pro"), "recipes", recipes)
    for request in ({"dry_run": True}, {"output": tmp_path / "out", "verify": False}):
        with pytest.raises(MethodError, match=f"^method llama-pro.*{message}"):
            upscale(base=base, method="llama-pro", **request)
    assert list(tmp_path.iterdir()) == []


def test_plan_without_a_base_layer_is_refused(base, monkeypatch):
    plan = Plan((Base(0), Base(3), Base(3)), 4)
    monkeypatch.setattr(get_method("solar"), "plan", lambda *arguments: plan)
    with pytest.raises(MethodError, match="plan of method solar has no base layer 1, 2; expected all layers"):
        upscale(base=base, method="solar", dry_run=True)


@pytest.mark.parametrize(
    ("method", "family", "changes", "error", "message"),
    [
        ("llama-pro", "llama", {"num_hidden_layers": 5}, MethodError, "num_hidden_layers = 5; expected 6, as many as its plan has"),
        ("llama-pro", "llama", {"vocab_size": 7}, MethodError, r"model.embed_tokens.weight is \[128, 32\]; expected \[7, 32\]"),
        ("llama-pro", "llama", {"intermediate_size": 47}, MethodError, r"layer 0: mlp.gate_proj.weight is .*; expected \[47, 32\]"),
        ("solar", "gemma2", {"tie_word_embeddings": False}, MethodError, r"outside the layers: .* no recipe for lm_head\.weight"),
        ("midus-hml", "qwen2", {"layer_types": ["full_attention"] * 6}, ValueError,
         "layer 3 has .* = 'full_attention' and its source, layer 2, has 'sliding_attention'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_config_of_a_method_is_refused(method, family, changes, error, message, shared_base, monkeypatch):
    config = get_method(method).config
    monkeypatch.setattr(get_method(method), "config", lambda *arguments: {**config(*arguments), **changes})
    with pytest.raises(error, match=message):
        upscale(base=shared_base(family), method=method, dry_run=True)
