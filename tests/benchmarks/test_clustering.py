"""The exponent of growth is that of the power law between two sizes."""

import dataclasses

import pytest

from benchmarks.clustering import Row, growth


@pytest.mark.parametrize("exponent", [0.5, 1, 2])
def test_growth_is_the_exponent_between_two_sizes(exponent):
    small = Row(*[""] * 7, threads=1, levels=3, stage="build", documents=1000, seconds=9.0, processor_s=3.0)
    large = dataclasses.replace(small, documents=4000, seconds=0.1, processor_s=3.0 * 4**exponent)
    assert growth(small, large) == pytest.approx(exponent)
