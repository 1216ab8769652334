"""Names that ops are registered under."""

import pytest
import torch

import midus_hf.ops.chapters.op  # noqa: F401 - registers them


@pytest.mark.parametrize(
    "name",
    [
        "headwise_lookup",
        "headwise_lookup_backward",
        "product_key_scores",
        "product_key_scores_backward",
        "weighted_gather",
        "chapter_segments",
        "chapter_segments_backward",
    ],
)
def test_ops_of_the_package_have_its_name_and_no_suffix(name):
    """Which only copies of the code that checkpoints bring along have."""
    assert hasattr(torch.ops.midus_hf, name)
