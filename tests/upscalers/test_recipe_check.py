"""What a method returns is held against the family's table before a byte is written, in a dry run too."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from upscalers.methods.contract import get_method
from upscalers.plan.plan import Base, Plan
from upscalers.request.errors import MethodError
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Copy, Fill, Recipe

Layers = list[dict[str, Recipe]]

KEY = "self_attn.k_proj.weight"


def changed(name: str, change: Callable[[Recipe], Recipe]) -> Callable[[Layers], None]:
    def change_recipe(layers: Layers) -> None:
        layers[2][name] = change(layers[2][name])

    return change_recipe


def copied(source: str, shape: tuple[int, ...]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: Copy(shape, source)


FAULTS: dict[str, tuple[Callable[[Layers], Any], str]] = {
    "all tensors of a layer left out": (
        lambda layers: layers[2].clear(),
        r"layer 2: there is no recipe for self_attn.q_proj.weight, .* and 6 others; expected one for each of 9 tensors",
    ),
    "a layer left out": (
        lambda layers: layers.pop(),
        "gives recipes for this many layers: [0-9]+; expected [0-9]+, as many as its plan has",
    ),
    "a name that nobody knows": (
        lambda layers: layers[2].update({"mlp.up_projection.weight": Fill((48, 32), 1.0)}),
        "layer 2: there is a recipe for mlp.up_projection.weight; expected none but for self_attn.q_proj.weight, ",
    ),
    "a wrong shape": (
        changed(KEY, lambda recipe: dataclasses.replace(recipe, shape=(32, 16))),
        rf"layer 2: {KEY} is \[32, 16\]; expected \[16, 32\]",
    ),
    "a source of a wrong shape": (
        changed(KEY, copied("model.layers.0.self_attn.q_proj.weight", (16, 32))),
        rf"layer 2: {KEY} is made from model.layers.0.self_attn.q_proj.weight, which is \[32, 32\]; expected \[16, 32\]",
    ),
    "a source that is not there": (
        changed(KEY, copied("model.layers.9.self_attn.k_proj.weight", (16, 32))),
        f"layer 2: {KEY} is made from model.layers.9.self_attn.k_proj.weight; expected a tensor of the base",
    ),
}  # fmt: skip


def spoil(monkeypatch, method: str, fault: Callable[[Layers], Any]) -> None:
    """Let a method return recipes with a fault."""
    sound = get_method(method).recipes

    def recipes(self, base, plan, seed) -> Layers:
        layers = [dict(layer) for layer in sound(self, base, plan, seed)]
        fault(layers)
        return layers

    monkeypatch.setattr(get_method(method), "recipes", recipes)


@pytest.mark.parametrize("name", FAULTS)
def test_a_method_that_breaks_the_contract_is_stopped_before_it_writes(name, base, tmp_path, monkeypatch):
    fault, message = FAULTS[name]
    spoil(monkeypatch, "llama-pro", fault)
    for request in ({"dry_run": True}, {"output": tmp_path / "out", "verify": False}):
        with pytest.raises(MethodError, match=f"^method llama-pro.*{message}"):
            upscale(base=base, method="llama-pro", **request)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_a_layer_of_the_base_is_refused(base, monkeypatch):
    plan = Plan((Base(0), Base(3), Base(3)), 4)
    monkeypatch.setattr(get_method("solar"), "plan", lambda *arguments: plan)
    message = "the plan of method solar has no base layer 1, 2; expected all layers of the base, or strip could not give it back"
    with pytest.raises(MethodError, match=message):
        upscale(base=base, method="solar", dry_run=True)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("llama-pro", {"num_hidden_layers": 5}, "gives a config with num_hidden_layers = 5; expected 6, as many as its plan has"),
        ("llama-pro", {"vocab_size": 7}, r"outside the layers: model.embed_tokens.weight is \[128, 32\]; expected \[7, 32\]"),
        ("llama-pro", {"intermediate_size": 47}, r"layer 0: mlp.gate_proj.weight is \[48, 32\]; expected \[47, 32\]"),
        ("solar", {"tie_word_embeddings": False}, r"solar, outside the layers: there is no recipe for lm_head\.weight"),
    ],
    ids=str,
)  # fmt: skip
def test_the_new_config_decides_what_is_expected(method, changes, message, shared_base, monkeypatch):
    config = get_method(method).config
    monkeypatch.setattr(get_method(method), "config", lambda *arguments: {**config(*arguments), **changes})
    with pytest.raises(MethodError, match=message):
        upscale(base=shared_base("gemma2" if method == "solar" else "llama"), method=method, dry_run=True)
