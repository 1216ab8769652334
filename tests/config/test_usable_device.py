"""The device that a person asks for is tried before anything is loaded."""

import pytest
import torch

from midus_hf.config.usable_device import usable_device


def test_without_a_word_it_is_the_first_gpu_or_the_processor():
    assert usable_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    assert usable_device("cpu", "float64") == "cpu"


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta", "hpu", "privateuseone"])
def test_one_that_is_not_here_is_refused(device):
    with pytest.raises(
        ValueError, match=rf"^device is '{device}', which cannot be used here \(.+\); expected one of: cpu(, cuda)?\.$"
    ):
        usable_device(device)


def test_where_torch_asserts_that_it_was_built_for_it_that_is_the_reason(monkeypatch):
    def lacking(*shape, **options):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", lacking)
    with pytest.raises(
        ValueError, match=r"'cuda', which cannot be used here \(Torch not compiled with CUDA enabled\)"
    ):
        usable_device("cuda")
