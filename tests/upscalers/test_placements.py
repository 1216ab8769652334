"""Where new layers stand and how many there are by default: the tables of MIDUS, appendix D, and the definitions as properties."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.upscalers.dense.requests import planned, tiny_config
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS, get_method
from upscalers.plan.placements import PLACEMENTS, place
from upscalers.request.errors import RequestError

TABLES = {
    (16, 8): {
        "distributed": [1, 4, 7, 10, 13, 16, 19, 22],
        "llama-pro": [2, 5, 8, 11, 14, 17, 20, 23],
        "top-heavy": [8, 10, 12, 14, 16, 18, 20, 22],
        "bottom-heavy": [0, 2, 4, 6, 8, 10, 12, 14],
    },
    (32, 16): {
        "distributed": [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37, 40, 43, 46],
        "llama-pro": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, 44, 47],
        "top-heavy": [16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46],
        "bottom-heavy": [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30],
    },
}
# By policy: whether K new layers fit among L, and the number of base layers in front of each.
DEFINED: dict[str, tuple[Callable[[int, int], bool], Callable[[int, int], Iterable[int]]]] = {
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
def test_a_policy_places_layers_as_it_is_defined_or_refuses(policy, num_layers, number):
    fits, in_front = DEFINED[policy]
    if fits(num_layers, number):
        expected = [base + index for index, base in enumerate(in_front(num_layers, number))]
        assert place(policy, num_layers, number) == expected
    else:
        with pytest.raises(RequestError, match=f"num-new-layers is {number}; placement {policy}"):
            place(policy, num_layers, number)


@given(POLICIES, st.integers(2, 60))
def test_by_default_it_is_the_largest_number_up_to_half_that_fits(policy, num_layers):
    number = max(number for number in range(1, num_layers // 2 + 1) if DEFINED[policy][0](num_layers, number))
    assert place(policy, num_layers, None) == place(policy, num_layers, number)


def test_every_method_plans_the_default_number_of_its_placement():
    assert {name: chosen for name, method in METHODS.items() if (chosen := method.default_placement)} == INSERTING
    message = "the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers"
    for method, placement in INSERTING.items():
        for num_layers in (2, 7):
            config = tiny_config("llama", num_hidden_layers=num_layers)
            assert planned(config, method).new_indices == place(placement, num_layers, None)
        with pytest.raises(RequestError, match=message):
            planned(tiny_config("llama", num_hidden_layers=1), method)


@given(st.integers(1, 40), st.integers(-1, 43))
def test_solar_stacks_two_copies_that_each_leave_as_many_layers_out(num_layers, number):
    config = tiny_config("llama", num_hidden_layers=num_layers)
    valid = [K for K in range(1, num_layers) if (num_layers - K) % 2 == 0]
    if num_layers < 3:
        with pytest.raises(RequestError, match=f"the base has {num_layers} layers; solar needs at least 3"):
            planned(config, "solar")
        return
    by_default = min(valid, key=lambda K: (abs(2 * K - num_layers), -K))
    assert planned(config, "solar").layers == planned(config, "solar", by_default).layers
    if number in valid:
        plan, left_out = planned(config, "solar", number), (num_layers - number) // 2
        assert plan.sources == [*range(num_layers - left_out), *range(left_out, num_layers)]
        assert plan.new_indices == [*range(num_layers - left_out, num_layers - left_out + number)]
    else:
        with pytest.raises(RequestError, match=f"num-new-layers is {number}; solar leaves the same number"):
            planned(config, "solar", number)


@pytest.mark.parametrize(("config", "sizes"), [(LLAMA_3_2_1B, (16, 8)), (LLAMA_3_1_8B, (32, 16))])
def test_by_default_the_papers_models_get_the_new_layers_of_its_tables(config, sizes, tmp_path, command):
    assert config["num_hidden_layers"] == sizes[0]
    assert {policy: place(policy, sizes[0], None) for policy in PLACEMENTS} == TABLES[sizes]
    base = write_config(tmp_path / "base", config)
    for method, indices in (("solar", None), ("midus-hml", TABLES[sizes]["distributed"])):
        done = command("--base", base, "--method", method, "--dry-run", "--json")
        assert (done.status, done.err) == (0, "")
        made = done.json()["new_layer_indices"]
        assert len(made) == sizes[1] and indices in (None, made)


def test_an_explicit_list_is_taken_as_it_stands_and_needs_no_divisor():
    for text in ("1,4,7", " 1, 4 ,7 "):
        assert place(text, 16, None) == place(text, 94, 3) == [1, 4, 7]


@pytest.mark.parametrize(
    ("placement", "num_layers", "num_new_layers", "message"),
    [
        ("bottom-heavy", 16, 17, "num-new-layers is 17; placement bottom-heavy fits at most 16, one before each"),
        ("distributed", 16, 0, "num-new-layers is 0; expected at least 1"),
        ("top-heavy", 16, -3, "num-new-layers is -3; expected at least 1"),
        ("1,4", 16, 3, "num-new-layers is 3, but placement lists 2 indices. Give one of the two"),
        ("1,,4", 16, None, "placement is '1,,4'; expected indices joined by commas, such as 1,4,7"),
        ("1,4-5", 16, None, "placement is '1,4-5'; expected indices joined by commas"),
        ("²", 16, None, "placement is '²'; expected indices joined by commas"),
        ("distributd", 16, None, "placement 'distributd' is unknown. Expected one of: "),
        ("zzz", 16, None, "placement 'zzz' is unknown. Expected one of: .* bottom-heavy, indices such as 3,7,11"),
        ("-", 16, None, "placement '-' is unknown"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused(placement, num_layers, num_new_layers, message):
    with pytest.raises(RequestError, match=message):
        place(placement, num_layers, num_new_layers)
