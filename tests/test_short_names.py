"""What models are called in tables and pictures."""

import pytest

from midus_hf.short_names import short_names


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["runs/base", "runs/trained/"], ["base", "trained"]),
        (["HuggingFaceTB/SmolLM2-135M"], ["SmolLM2-135M"]),
        (["a/model", "b/model"], ["a/model", "b/model"]),
        (["."], ["."]),
        ([], []),
    ],
)
def test_a_model_is_called_by_the_end_of_its_path_where_that_tells_it_apart(models, expected):
    assert short_names(models) == expected
