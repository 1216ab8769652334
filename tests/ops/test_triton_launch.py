"""What launches of kernels are told of numbers and of GPUs."""

import pytest
import torch

from midus_hf.ops.dispatch.triton import power_of_two, precise_product, quotient_above, wide_ranged_product


@pytest.mark.parametrize(
    ("hip", "expected"), [(None, ("tf32x3", "tf32")), ("6.4", ("ieee", "ieee"))], ids=["NVIDIA", "AMD"]
)
def test_amd_gpus_are_asked_for_no_tf32_which_most_of_them_lack(hip, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (precise_product(), wide_ranged_product()) == expected


def test_numbers_are_rounded_up():
    assert [quotient_above(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_two(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
