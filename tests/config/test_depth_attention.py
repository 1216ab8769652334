"""Attention over the depth as it is declared: sizes and operations of the paper's models, who reads what, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from midus_hf.config.declared_tensors import ZEROS, ModelSizes
from midus_hf.memories.flops import MASK_AND_SCALE
from midus_hf.memories.moda.options import ModaOptions, Slot
from upscalers.architecture.flops import count_flops as estimate_flops
from upscalers.architecture.flops import count_parameters

MODELS = Path(__file__).parents[2] / "configs" / "models"
SIZES = ModelSizes(hidden_size=32, num_heads=4, num_key_value_heads=2, num_layers=4)
WITHOUT_FFN = {"ffn_slots": False}
PROJECTED = {"attention_slots": "projected"}


def config_of(name: str, layers: int | None = None, without: bool = False, **options: Any) -> dict[str, Any]:
    """A model of the paper, with other options of its memory or without it, and as many layers."""
    config = json.loads((MODELS / f"{name}.json").read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
    for entry in config["memory"]:
        entry.update(options)
    return {**config, "memory": []} if without else config


@pytest.mark.parametrize(
    ("config", "millions", "trillions"),
    [
        (config_of("olmo2-669m"), 669.0, 8.01),
        (config_of("olmo2-669m", 38), 700.5, 8.41),
        (config_of("moda-706m", **WITHOUT_FFN), 669.0, 8.02),
        (config_of("moda-706m"), 705.7, 8.33),
        (config_of("moda-706m", **PROJECTED), 742.4, 8.63),
    ],
    ids=str,
)
def test_moda_models_have_the_papers_parameters_and_flops(config, millions, trillions):
    """Table 3, which has no price for mask and scale of the scores of the sequence. What a number has there is compared."""
    tokens, layers = 4096, config["num_hidden_layers"]
    scores = layers * config["num_attention_heads"] * tokens**2
    assert round(count_parameters(config)["total"] / 1e6, 1) == millions
    assert round((estimate_flops(config, tokens).forward - MASK_AND_SCALE * scores) / 1e12, 2) == trillions


@pytest.mark.parametrize(
    ("name", "layers", "plain", "millions"), [("moda-74m", 24, 71.35, 73.72), ("moda-128m", 48, 123.38, 128.11)]
)
def test_last_layer_has_no_unread_projection(name, layers, plain, millions):
    """Table 6 has a projection in every layer, that of the last included; table 3 has none there."""
    projection = 2 * (384 * 128 + 128)
    totals = [count_parameters(config_of(name, **more))["total"] for more in ({}, {"without": True}, WITHOUT_FFN)]
    assert [round(total / 1e6, 2) for total in totals[1:]] == [plain] * 2
    assert totals[0] - totals[1] == (layers - 1) * projection
    assert (totals[0] + projection) / 1e6 == pytest.approx(millions, abs=0.01)


def test_slots_are_read_by_later_layers_only():
    options = ModaOptions(attention_slots="reused")
    assert options.slots_read(0) == ()
    assert options.slots_read(2) == tuple(Slot(layer, source) for layer in (0, 1) for source in ("attention", "ffn"))
    taken = ("attention_key", "attention_value", "ffn_key", "ffn_value")
    assert options.layer_inputs(1) == tuple((0, name) for name in taken)
    assert options.layer_outputs(1, 3) and not options.layer_outputs(2, 3)
    projections = {"ffn_key.weight", "ffn_value.weight"}
    expected = [projections, {"depth_gate", *projections}, {"depth_gate"}]
    assert [set(options.tensors_at(SIZES, index, 3)) for index in range(3)] == expected


@pytest.mark.parametrize(
    ("joining", "gates", "silent"),
    [
        ("added", True, {"ffn_value.weight", "attention_value.weight"}),
        ("interpolated", True, set()),
        ("joint", False, set()),
    ],
)
def test_initial_tensors_follow_the_way_of_joining(joining, gates, silent):
    tensors = ModaOptions(joining=joining, attention_slots="projected").tensors(SIZES)
    assert ("depth_gate" in tensors) == gates
    assert {name for name, tensor in tensors.items() if tensor.initial == ZEROS} - {"depth_gate"} == silent
    assert not gates or tensors["depth_gate"].initial == ZEROS
