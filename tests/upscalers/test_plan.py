"""The layer plan: which layer of the upscaled model comes from where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upscalers.plan.plan import Base, New, Plan, insertion_plan
from upscalers.request.errors import RequestError


@st.composite
def insertions(draw) -> tuple[int, list[int]]:
    """A number of base layers, and indices to insert at."""
    num_layers = draw(st.integers(1, 30))
    num_new_layers = draw(st.integers(0, 20))
    total = num_layers + num_new_layers
    return num_layers, sorted(draw(st.permutations(range(total)))[:num_new_layers])


def test_a_plan_names_the_neighbours_of_each_new_layer():
    plan = insertion_plan(3, [0, 2, 5])
    assert plan.layers == (New(None, 0), Base(0), New(0, 1), Base(1), Base(2), New(2, None))
    assert (plan.num_layers, plan.num_base_layers, plan.new_indices) == (6, 3, [0, 2, 5])


def test_adjacent_new_layers_have_the_same_neighbours():
    assert insertion_plan(2, [1, 2]).layers == (Base(0), New(0, 1), New(0, 1), Base(1))


@given(insertions())
def test_each_base_layer_appears_once_in_order(insertion):
    num_layers, indices = insertion
    plan = insertion_plan(num_layers, indices)
    assert [layer.index for layer in plan.layers if isinstance(layer, Base)] == list(range(num_layers))
    assert plan.new_indices == indices
    assert plan.num_layers == num_layers + len(indices)


@given(insertions())
def test_the_neighbours_of_a_new_layer_are_the_base_layers_around_it(insertion):
    plan = insertion_plan(*insertion)
    for index, layer in enumerate(plan.layers):
        if isinstance(layer, New):
            before = [other.index for other in plan.layers[:index] if isinstance(other, Base)]
            after = [other.index for other in plan.layers[index:] if isinstance(other, Base)]
            assert layer == New(before[-1] if before else None, after[0] if after else None)


@given(insertions())
def test_a_plan_survives_being_written_as_plain_data(insertion):
    plan = insertion_plan(*insertion)
    assert Plan.from_list(plan.to_list(), plan.num_base_layers) == plan


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 1], "placement is 3,1; expected ascending indices without repetition. Sort them and drop repeats"),
        ([1, 1], "placement is 1,1; expected ascending indices without repetition"),
        ([0, 6], r"placement is 0,6; expected indices from 0 to 5, counted in the upscaled model of 4 \+ 2 layers"),
        ([-1], r"placement is -1; expected indices from 0 to 4, counted in the upscaled model of 4 \+ 1 layers"),
    ],
)
def test_indices_that_make_no_plan_are_refused(indices, message):
    with pytest.raises(RequestError, match=message):
        insertion_plan(4, indices)
