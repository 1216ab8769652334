"""The layer plan, and what a config says of single layers, which follows the plan."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES as TINY

from midus_hf.memories.headwise.options import HeadwiseOptions
from upscalers.architecture.families import family_of
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.midus import MidusHml
from upscalers.plan.layer_config import follow_plan
from upscalers.plan.plan import Base, New, Plan, insertion_plan
from upscalers.request.errors import RequestError


@st.composite
def insertions(draw) -> tuple[int, list[int]]:
    """A number of base layers, and indices to insert at."""
    num_layers = draw(st.integers(1, 30))
    num_new_layers = draw(st.integers(0, 20))
    total = num_layers + num_new_layers
    return num_layers, sorted(draw(st.permutations(range(total)))[:num_new_layers])


@given(insertions())
def test_each_base_layer_appears_once_in_order_and_new_layers_know_those_around_them_also_as_plain_data(insertion):
    num_layers, indices = insertion
    plan = insertion_plan(num_layers, indices)
    assert [layer.index for layer in plan.layers if isinstance(layer, Base)] == list(range(num_layers))
    assert plan.new_indices == indices
    assert plan.num_layers == num_layers + len(indices)
    for index, layer in enumerate(plan.layers):
        if isinstance(layer, New):
            before = [other.index for other in plan.layers[:index] if isinstance(other, Base)]
            after = [other.index for other in plan.layers[index:] if isinstance(other, Base)]
            assert layer == New(before[-1] if before else None, after[0] if after else None)
    assert Plan.from_list(plan.to_list(), plan.num_base_layers) == plan


def test_indices_that_make_no_plan_are_refused():
    for indices, message in (
        ([3, 1], "placement is 3,1; expected ascending indices without repetition from 0 to 5"),
        ([1, 1], "placement is 1,1; expected ascending indices without repetition"),
        ([-1], r"placement is -1; .* from 0 to 4, counted in the upscaled model of 4 \+ 1 layers"),
    ):
        with pytest.raises(RequestError, match=message):
            insertion_plan(4, indices)


FULL, SLIDING = "full_attention", "sliding_attention"


def followed(config: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    """The config after new layers are inserted at `indices`."""
    base = BaseCheckpoint(Path(), config, family_of(config), layout_of(config), {})
    method = MidusHml(HeadwiseOptions())
    return follow_plan(base, method.plan(base, None, ",".join(map(str, indices))))


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    return {**TINY[family].config().to_dict(), **changes}


# What config.json says of layers 0 to 3, and what it says after new layers are inserted as 1 and 4 (beside layers 1 and 3).
FOLLOWING = [
    ({"no_rope_layers": [1, 0, 1, 0]}, {"no_rope_layers": [1, 0, 0, 1, 0, 0]}),
    ({"mlp_only_layers": [0, 3]}, {"mlp_only_layers": [0, 4, 5]}),
    (
        {"attention": {"no_rope_layers": [1, 0, 1, 0], "deep": {"moe_layers": [0, 3]}}},
        {"attention": {"no_rope_layers": [1, 0, 0, 1, 0, 0], "deep": {"moe_layers": [0, 4, 5]}}},
    ),
    (
        {"parts": [{"full_attn_idxs": [2]}, [{"mlp_layer_types": [*"abcd"]}]]},
        {"parts": [{"full_attn_idxs": [3]}, [{"mlp_layer_types": [*"abbcdd"]}]]},
    ),
    (
        {"memory": [{"type": "headwise", "layers": [1, 3], "n": 4, "k": 2}]},
        {"memory": [{"type": "headwise", "layers": [2, 5], "n": 4, "k": 2}]},
    ),
]
# What has nothing to do with layers.
KEPT = {
    "rope_parameters": {"rope_type": "longrope", "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4},
    "upscale": {"plan": [{"base": 0}] * 4, "base_config": {"windows": [1, 2, 3, 4]}},
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "eos_token_id": [1, 2, 3, 4],
}
NUMBERED = [("0", "4"), ("0", "9"), ("9",)]  # numbers that no layer has


@pytest.mark.parametrize(
    ("changes", "expected"),
    [*FOLLOWING, (KEPT, KEPT), *(({"sizes": dict.fromkeys(n, 8)}, {"sizes": dict.fromkeys(n, 8)}) for n in NUMBERED)],
)
def test_what_a_config_says_of_layers_follows_the_plan_and_all_else_is_kept(changes, expected):
    config = tiny_config("llama", **copy.deepcopy(changes))
    before = copy.deepcopy(config)
    result = followed(config, [1, 4])
    assert {key: result[key] for key in expected} == expected and result["num_hidden_layers"] == 6
    assert config == before


def test_the_first_new_layer_has_the_type_of_the_next_base_layer_and_the_last_one_of_the_previous():
    config = tiny_config("gemma2", layer_types=[SLIDING, FULL, SLIDING, FULL])
    assert followed(config, [0, 2, 6])["layer_types"] == [SLIDING, SLIDING, FULL, FULL, SLIDING, FULL, FULL]
    assert "layer_types" not in followed(tiny_config("llama"), [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_of_layer": [8, 8, 4, 4]}, r"config.json has window_of_layer, a list as long as the model has layers \(4\)"),
        ({"attention": {"windows": [8, 8, 4, 4]}}, r"config.json has attention.windows, a list as long as the model has layers"),
        ({"parts": [{}, {"deep": {"windows": [8, 8, 4, 4]}}]}, r"config.json has parts\[1\].deep.windows, a list as long as"),
        ({"parts": [[[8, 8, 4, 4]]]}, r"config.json has parts\[0\]\[0\], a list as long as the model has layers"),
        ({"rope_parameters": {"theta": [1.0] * 4}}, "config.json has rope_parameters.theta, a list as long as"),
        ({"pruned_heads": {"1": [0]}}, r"config.json has pruned_heads, a mapping by numbers below that .* Declare"),
        ({"a": {"windows": {"0": 8, "3": 4}}}, "config.json has a.windows, a mapping by numbers below that of the layers"),
        ({"a": {"no_rope_layers": [1, 0]}}, "config.json lists 2 a.no_rope_layers; expected 4, one per layer"),
        ({"a": [{"mlp_only_layers": [4]}]}, r"config.json lists 4 in a\[0\].mlp_only_layers; expected layers from 0 to 3"),
        ({"layer_types": [FULL, FULL]}, "config.json lists 2 layer_types; expected 4, one per layer"),
        ({"no_rope_layers": [1, 0]}, "config.json lists 2 no_rope_layers; expected 4, one per layer"),
        ({"mlp_only_layers": [4]}, "config.json lists 4 in mlp_only_layers; expected layers from 0 to 3"),
        ({"mlp_only_layers": [None]}, "config.json lists None in mlp_only_layers; expected layers from 0 to 3"),
    ],
)  # fmt: skip
def test_a_list_that_cannot_follow_the_plan_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        followed(tiny_config("qwen3", **changes), [1])
