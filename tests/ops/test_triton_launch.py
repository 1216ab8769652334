"""Kernels are launched with the products of matrices that GPUs of each maker have."""

import pytest
import torch

from midus_hf.ops.dispatch.triton import precise_product, wide_ranged_product


@pytest.mark.parametrize(
    ("hip", "expected"), [(None, ("tf32x3", "tf32")), ("6.4", ("ieee", "ieee"))], ids=["NVIDIA", "AMD"]
)
def test_amd_gpus_are_asked_for_no_tf32_which_most_of_them_lack(hip, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (precise_product(), wide_ranged_product()) == expected
