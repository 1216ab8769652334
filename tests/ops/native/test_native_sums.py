"""Sums and products of rows in C: whatever the size of tables, and nothing read outside of what was given."""

import pytest
import torch

from midus_hf.ops import weighted_gather
from midus_hf.ops.gather.native import native_gathered_products, native_row_sums, native_weighted_rows

pytestmark = pytest.mark.usefixtures("library")


def inputs(tokens=90, m=7, rows=40, width=150, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    bank, vectors = (torch.randn(count, width, generator=generator).to(dtype) for count in (rows, tokens))
    slots = torch.randint(rows, (tokens, m), generator=generator)
    return bank, vectors, slots, torch.randn(tokens, m, generator=generator)


def all_three(bank, vectors, slots, weights):
    return (
        native_weighted_rows(bank, slots, weights),
        native_row_sums(vectors, slots, weights, len(bank)),
        native_gathered_products(vectors, bank, slots),
    )


def test_tables_that_no_cache_holds_give_the_same_bits():
    """They are read row by row, and smaller ones some columns at a time."""
    bank, _, slots, weights = inputs()
    large = torch.zeros(40000, 150)
    large[:40] = bank
    assert torch.equal(native_weighted_rows(large, slots, weights), native_weighted_rows(bank, slots, weights))


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_slots_of_any_integers_are_read(kind):
    bank, vectors, slots, weights = inputs()
    expected = all_three(bank, vectors, slots, weights)
    actual = all_three(
        bank.T.contiguous().T, vectors.T.contiguous().T, slots.to(kind).T.contiguous().T, weights.double()
    )
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("outside", [-1, 40, 1 << 40])
def test_slots_outside_of_the_bank_are_refused(outside):
    bank, vectors, slots, weights = inputs()
    slots[3, 2] = outside
    message = "slots are outside the bank; expected 0 <= slot < its rows. Check the code that made them"
    for call in (
        lambda: native_weighted_rows(bank, slots, weights),
        lambda: native_row_sums(vectors, slots, weights, 40),
        lambda: native_gathered_products(vectors, bank, slots),
        lambda: weighted_gather(bank, slots, weights),
    ):
        with pytest.raises(IndexError, match=message):
            call()
