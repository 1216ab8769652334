"""Rows that are stored as integers with a scale each."""

import pytest
import torch

from midus_hf.ops.chapters.quantisation import dequantise_rows, quantise_rows


def table(rows=7, width=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.logspace(-3, 2, rows)[:, None]


@pytest.mark.parametrize(("bits", "levels", "dtype", "width"), [(8, 127, torch.int8, 10), (4, 7, torch.uint8, 5)])
def test_no_element_is_further_off_than_half_a_step_of_its_row(bits, levels, dtype, width):
    rows = table()
    integers, scales = quantise_rows(rows, bits)
    assert integers.dtype == dtype and integers.shape == (7, width) and scales.shape == (7,)
    restored = dequantise_rows(integers, scales, bits, torch.float32)
    step = rows.abs().amax(-1, keepdim=True) / levels
    assert ((restored - rows).abs() <= 0.5001 * step).all()
    assert torch.allclose(restored.abs().amax(-1), rows.abs().amax(-1))  # the largest element of a row is exact


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_stand_for_themselves(bits):
    levels = 127 if bits == 8 else 7
    rows = torch.arange(-levels, levels + 1).repeat(2).float().view(2, -1)
    rows = torch.cat([rows, torch.zeros(2, 1)], dim=1)
    integers, scales = quantise_rows(rows, bits)
    assert torch.equal(scales, torch.ones(2))
    assert torch.equal(dequantise_rows(integers, scales, bits, torch.float64), rows.double())


def test_the_low_half_of_a_byte_holds_the_element_of_an_even_index():
    integers, _ = quantise_rows(torch.tensor([[7.0, -7.0, 0.0, 1.0]]), 4)
    assert integers.tolist() == [[0x97, 0x10]]


def test_a_row_of_zeros_stays_one():
    for bits in (8, 4):
        assert not dequantise_rows(*quantise_rows(torch.zeros(3, 4), bits), bits, torch.bfloat16).any()


def test_parts_of_a_table_are_those_of_the_whole():
    integers, scales = quantise_rows(table(), 4)
    whole = dequantise_rows(integers, scales, 4, torch.float32)
    chosen = torch.tensor([[5, 1], [0, 0]])
    assert torch.equal(dequantise_rows(integers[chosen], scales[chosen], 4, torch.float32), whole[chosen])


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match=r"bits is 3; expected 8 or 4\."):
        quantise_rows(table(), 3)
    with pytest.raises(ValueError, match=r"bits is 16; expected 8 or 4\."):
        dequantise_rows(torch.zeros(1, 2), torch.ones(1), 16, torch.float32)
    with pytest.raises(
        ValueError, match=r"rows have 9 elements; expected an even number, two per byte\. Choose 8 bits\."
    ):
        quantise_rows(table(width=9), 4)
