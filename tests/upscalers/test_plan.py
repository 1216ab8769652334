"""The layer plan: places and number of new layers, and what a config says of single layers."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.upscalers.methods import known, planned, tiny_config
from upscalers.methods.contract import METHODS, get_method
from upscalers.plan import PLACEMENTS, Base, New, Plan, follow_plan, insertion_plan, place

# Of 16 layers, which get 8.
TABLE = {
    "distributed": [1, 4, 7, 10, 13, 16, 19, 22], "llama-pro": [2, 5, 8, 11, 14, 17, 20, 23],
    "top-heavy": [8, 10, 12, 14, 16, 18, 20, 22], "bottom-heavy": [0, 2, 4, 6, 8, 10, 12, 14],
}  # fmt: skip
# By policy: whether K new layers fit among L, and the number of base layers in front of each.
DEFINED = {
    "distributed": (lambda L, K: L % K == 0, lambda L, K: [(group + 1) * L // K - 1 for group in range(K)]),
    "llama-pro": (lambda L, K: L % K == 0, lambda L, K: [(group + 1) * L // K for group in range(K)]),
    "top-heavy": (lambda L, K: K < L, lambda L, K: range(L - K, L)),
    "bottom-heavy": (lambda L, K: K <= L, lambda L, K: range(K)),
}
POLICIES = st.sampled_from(sorted(DEFINED))
get_method("solar")
# Methods that insert layers where a placement says, and their own placement.
INSERTING = {
    **dict.fromkeys(("midus-hml", "midus-pkm", "midus-linear"), "distributed"),
    "llama-pro": "llama-pro",
    **dict.fromkeys(("avg-deus", "lesa", "opt-deus"), "top-heavy"),
}


@given(POLICIES, st.integers(1, 60), st.integers(1, 60))
def test_policy_places_as_defined_or_refuses(policy, num_layers, number):
    fits, in_front = DEFINED[policy]
    if fits(num_layers, number):
        expected = [base + index for index, base in enumerate(in_front(num_layers, number))]
        assert place(policy, num_layers, number) == expected
    else:
        with pytest.raises(ValueError, match=f"num-new-layers is {number}; placement {policy}"):
            place(policy, num_layers, number)


@given(POLICIES, st.integers(2, 60))
def test_default_is_the_largest_number_up_to_half(policy, num_layers):
    number = max(number for number in range(1, num_layers // 2 + 1) if DEFINED[policy][0](num_layers, number))
    assert place(policy, num_layers, None) == place(policy, num_layers, number)


def test_methods_plan_their_default_placement():
    assert {name: chosen for name, method in METHODS.items() if (chosen := method.default_placement)} == INSERTING
    message = "the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers"
    for method, placement in INSERTING.items():
        for num_layers in (2, 7):
            config = tiny_config("llama", num_hidden_layers=num_layers)
            assert planned(config, method).new_indices == place(placement, num_layers, None)
        with pytest.raises(ValueError, match=message):
            planned(tiny_config("llama", num_hidden_layers=1), method)


@given(st.integers(1, 40), st.integers(-1, 43))
def test_solar_stacks_two_copies(num_layers, number):
    config = tiny_config("llama", num_hidden_layers=num_layers)
    valid = [K for K in range(1, num_layers) if (num_layers - K) % 2 == 0]
    if num_layers < 3:
        with pytest.raises(ValueError, match=f"the base has {num_layers} layers; solar needs at least 3"):
            planned(config, "solar")
        return
    by_default = min(valid, key=lambda K: (abs(2 * K - num_layers), -K))
    assert planned(config, "solar").layers == planned(config, "solar", by_default).layers
    if number in valid:
        plan, left_out = planned(config, "solar", number), (num_layers - number) // 2
        assert plan.sources == [*range(num_layers - left_out), *range(left_out, num_layers)]
        assert plan.new_indices == [*range(num_layers - left_out, num_layers - left_out + number)]
    else:
        with pytest.raises(ValueError, match=f"num-new-layers is {number}; solar leaves the same number"):
            planned(config, "solar", number)


@pytest.mark.parametrize("layers", [["0-2", "1-3"], "0-2,1-3", " 0 - 2 ,1,2, 3", [0, 1, "2", "1-1", "2-3"]], ids=str)
def test_stack_has_the_layers_of_its_ranges(layers):
    plan = planned(tiny_config("llama", num_hidden_layers=4), "stack", layers=layers)
    assert plan.sources == [0, 1, 2, 1, 2, 3]
    assert all(isinstance(layer, Base) for layer in plan.layers)


@st.composite
def insertions(draw) -> tuple[int, list[int]]:
    """A number of base layers, and indices to insert at."""
    num_layers, num_new_layers = draw(st.integers(1, 30)), draw(st.integers(0, 20))
    total = num_layers + num_new_layers
    return num_layers, sorted(draw(st.permutations(range(total)))[:num_new_layers])


@given(insertions())
def test_plan_keeps_base_layers_in_order(insertion):
    num_layers, indices = insertion
    plan = insertion_plan(num_layers, indices)
    assert [layer.index for layer in plan.layers if isinstance(layer, Base)] == list(range(num_layers))
    assert (plan.new_indices, plan.num_layers) == (indices, num_layers + len(indices))
    for index in indices:
        before = [other.index for other in plan.layers[:index] if isinstance(other, Base)]
        after = [other.index for other in plan.layers[index:] if isinstance(other, Base)]
        assert plan.layers[index] == New(before[-1] if before else None, after[0] if after else None)
    assert Plan.from_list(plan.to_list(), plan.num_base_layers) == plan


FULL, SLIDING = "full_attention", "sliding_attention"


def followed(config: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    """The config after new layers are inserted at `indices`."""
    return follow_plan(known(config), planned(config, "midus-hml", placement=",".join(map(str, indices))))


# What config.json says of layers 0 to 3, and what it says after new layers are inserted as 1 and 4 (next to layers 1 and 3).
FOLLOWING = [
    ({"no_rope_layers": [1, 0, 1, 0]}, {"no_rope_layers": [1, 0, 0, 1, 0, 0]}),
    ({"mlp_only_layers": [0, 3]}, {"mlp_only_layers": [0, 4, 5]}),
    ({"attention": {"deep": {"moe_layers": [0, 3]}}}, {"attention": {"deep": {"moe_layers": [0, 4, 5]}}}),
    ({"parts": [{"full_attn_idxs": [2]}, [{"mlp_layer_types": [*"abcd"]}]]},
     {"parts": [{"full_attn_idxs": [3]}, [{"mlp_layer_types": [*"abbcdd"]}]]}),
    ({"memory": [{"type": "midus-hml", "layers": [1, 3], "n": 4, "k": 2}]},
     {"memory": [{"type": "midus-hml", "layers": [2, 5], "n": 4, "k": 2}]}),
]  # fmt: skip
# What has nothing to do with layers.
KEPT: list[dict[str, Any]] = [{
    "rope_parameters": {"rope_type": "longrope", "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4},
    "upscale": {"plan": [{"base": 0}] * 4, "base_config": {"windows": [1, 2, 3, 4]}},
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "eos_token_id": [1, 2, 3, 4],
}]  # fmt: skip
KEPT += [{"sizes": dict.fromkeys(numbers, 8)} for numbers in (("0", "4"), ("0", "9"), ("9",))]  # which no layer has


@pytest.mark.parametrize(("changes", "expected"), [*FOLLOWING, *((kept, kept) for kept in KEPT)])
def test_config_follows_the_plan(changes, expected):
    config = {**tiny_config("llama"), **copy.deepcopy(changes)}
    before, result = copy.deepcopy(config), followed(config, [1, 4])
    assert {key: result[key] for key in expected} == expected
    assert result["num_hidden_layers"] == 6
    assert config == before


def test_new_layers_have_types_of_their_neighbours():
    config = tiny_config("gemma2", layer_types=[SLIDING, FULL, SLIDING, FULL])
    assert followed(config, [0, 2, 6])["layer_types"] == [SLIDING, SLIDING, FULL, FULL, SLIDING, FULL, FULL]
    assert "layer_types" not in followed(tiny_config("llama"), [1])


def test_placements_are_those_of_the_paper_or_listed():
    assert {policy: place(policy, 16, None) for policy in PLACEMENTS} == TABLE
    for text in ("1,4,7", " 1, 4 ,7 "):  # which need no divisor
        assert place(text, 16, None) == place(text, 94, 3) == [1, 4, 7]


REFUSED = [
    (place, ("bottom-heavy", 16, 17), "num-new-layers is 17; placement bottom-heavy fits at most 16, one before each"),
    (place, ("distributed", 16, 0), "num-new-layers is 0; expected at least 1"),
    (place, ("1,4", 16, 3), "num-new-layers is 3, but placement lists 2 indices. Give one"),
    *((place, (text, 16, None), f"placement is '{text}'; expected indices joined by commas") for text in ("1,,4", "²")),
    (place, ("distributd", 16, None), "placement 'distributd' is unknown. Expected one of: .* bottom-heavy, indices such as"),
    *((insertion_plan, (4, [i, 1]), f"placement is {i},1; expected ascending indices without repetition") for i in (3, 1)),
    (insertion_plan, (4, [-1]), r"placement is -1; .* from 0 to 4, counted in the upscaled model of 4 \+ 1 layers"),
    *(
        (lambda changes: followed({**tiny_config("qwen3"), **changes}, [1]), (changes,), message)
        for changes, message in (
            ({"window_of_layer": [8, 8, 4, 4]}, r"has window_of_layer, a list as long as the model has layers \(4\)"),
            ({"parts": [{}, {"deep": {"windows": [8, 8, 4, 4]}}]}, r"has parts\[1\].deep.windows, a list as long"),
            ({"parts": [[[8, 8, 4, 4]]]}, r"has parts\[0\]\[0\], a list as long"),
            ({"rope_parameters": {"theta": [1.0] * 4}}, "has rope_parameters.theta, a list as long"),
            ({"pruned_heads": {"1": [0]}}, "has pruned_heads, a mapping by numbers below .* Declare"),
            ({"a": {"windows": {"0": 8, "3": 4}}}, "has a.windows, a mapping by numbers below"),
            ({"a": {"no_rope_layers": [1, 0]}}, "lists 2 a.no_rope_layers; expected 4, one per layer"),
            ({"a": [{"mlp_only_layers": [4]}]}, r"lists 4 in a\[0\].mlp_only_layers; expected layers from 0 to 3"),
            ({"layer_types": [FULL, FULL]}, "lists 2 layer_types; expected 4, one per layer"),
            ({"mlp_only_layers": [None]}, "lists None in mlp_only_layers; expected layers from 0 to 3"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_wrong_placements_and_lists_are_refused(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)
