"""Placement policies: the tables of MIDUS, appendix D, explicit lists, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upscalers.plan.placements import PLACEMENTS, place, register_placement
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


@pytest.mark.parametrize("sizes", TABLES, ids=str)
@pytest.mark.parametrize("policy", ["distributed", "llama-pro", "top-heavy", "bottom-heavy"])
def test_policies_reproduce_the_tables_of_the_paper(policy, sizes):
    assert place(policy, *sizes) == TABLES[sizes][policy]


@pytest.mark.parametrize("policy", ["distributed", "llama-pro", "top-heavy", "bottom-heavy"])
def test_half_the_layers_are_the_default(policy):
    assert place(policy, 16, None) == TABLES[16, 8][policy]


@pytest.mark.parametrize("text", ["1,4,7", " 1, 4 ,7 "])
def test_an_explicit_list_is_taken_as_it_stands(text):
    assert place(text, 16, None) == [1, 4, 7]
    assert place(text, 16, 3) == [1, 4, 7]


def test_an_explicit_list_needs_no_divisor():
    assert place("47,52,57", 94, None) == [47, 52, 57]


@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 60), st.integers(1, 60))
def test_a_policy_gives_k_ascending_indices_of_the_upscaled_model_or_refuses(policy, num_layers, num_new_layers):
    try:
        indices = place(policy, num_layers, num_new_layers)
    except RequestError as error:
        fits = {"top-heavy": num_layers - 1, "bottom-heavy": num_layers}.get(policy)
        assert num_new_layers > fits if fits is not None else num_layers % num_new_layers
        assert f"num-new-layers is {num_new_layers}" in str(error)
    else:
        assert len(indices) == num_new_layers
        assert indices == sorted(set(indices))
        assert 0 <= indices[0] and indices[-1] < num_layers + num_new_layers


@pytest.mark.parametrize(
    ("placement", "num_layers", "num_new_layers", "message"),
    [
        ("distributed", 16, 5, r"num-new-layers is 5; placement distributed needs a divisor of the 16 base layers: 1, 2, 4, 8, 16\."),
        ("llama-pro", 16, 32, "num-new-layers is 32; placement llama-pro needs a divisor of the 16 base layers"),
        ("top-heavy", 16, 16, "num-new-layers is 16; placement top-heavy fits at most 15, one in each gap"),
        ("bottom-heavy", 16, 17, "num-new-layers is 17; placement bottom-heavy fits at most 16, one before each"),
        ("distributed", 16, 0, "num-new-layers is 0; expected at least 1"),
        ("top-heavy", 16, -3, "num-new-layers is -3; expected at least 1"),
        ("distributed", 1, None, "the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers"),
        ("1,4", 16, 3, "num-new-layers is 3, but placement lists 2 indices. Give one of the two"),
        ("1,,4", 16, None, "placement is '1,,4'; expected indices joined by commas, such as 1,4,7"),
        ("1,4-5", 16, None, "placement is '1,4-5'; expected indices joined by commas"),
        ("²", 16, None, "placement is '²'; expected indices joined by commas"),
        ("distributd", 16, None, "placement 'distributd' is unknown. Did you mean 'distributed'"),
        ("zzz", 16, None, "placement 'zzz' is unknown. Expected one of: .* whole-periods, indices such as 3,7,11"),
        ("-", 16, None, "placement '-' is unknown"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused(placement, num_layers, num_new_layers, message):
    with pytest.raises(RequestError, match=message):
        place(placement, num_layers, num_new_layers)


def test_a_policy_cannot_take_the_name_of_another():
    with pytest.raises(ValueError, match="placement 'top-heavy' is already registered; choose another name"):
        register_placement("top-heavy")
