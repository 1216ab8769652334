"""Rows that are summed by a product of the whole bank, against the reference, and when that is chosen."""

import pytest
import torch
from ops.kernels.conftest import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from midus_hf.ops import weighted_gather
from midus_hf.ops.gather import rows_by_product
from midus_hf.ops.gather.rows_by_product import product_takes_less
from midus_hf.ops.gather.triton import triton_spread_weights
from midus_hf.ops.gather.weighted import multiplies_all, weighted_gather_op


def inputs(tokens, m, rows, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    bank = torch.randn(rows, width, generator=generator)
    slots = torch.randint(rows, (tokens, m), generator=generator)
    slots[:, m // 2 :] = slots[:, :1]  # heads may read the same row
    weights = torch.rand(tokens, m, generator=generator)
    return bank.to(DEVICE, dtype).requires_grad_(), slots.to(DEVICE), weights.to(DEVICE).requires_grad_()


def gathered(bank, slots, weights, backend):
    return weighted_gather_op(bank, slots, weights, backend, "product")


def test_tokens_go_through_a_stretch_at_a_time(monkeypatch, backend):
    arguments = inputs(23, 4, 10, 8)
    whole = gathered(*arguments, backend)
    monkeypatch.setattr(rows_by_product, "_MOST_ELEMENTS", 10 * 5)
    parts = gathered(*arguments, backend)
    leaves = (arguments[0], arguments[2])
    assert torch.equal(whole, parts)
    for one, other in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (whole, parts)), strict=True):
        torch.testing.assert_close(one, other)


def test_weights_of_one_row_add_up_before_they_are_rounded():
    slots, weights = torch.tensor([[3, 3, 3, 0]]), torch.tensor([[1.0, 2.0**-8, 2.0**-8, 0.5]])
    spread = triton_spread_weights(slots.to(DEVICE), weights.to(DEVICE), 5, torch.bfloat16)
    assert torch.equal(spread, torch.tensor([[0.5, 0, 0, 1 + 2.0**-7, 0]]).to(DEVICE, torch.bfloat16))


@pytest.mark.parametrize(
    "tokens, m, rows, width, expected",
    [
        (32768, 128, 4096, 2048, True),  # midus-pkm of Llama-3.2-1B
        (32768, 128, 4096, 4096, True),  # of Llama-3.1-8B
        (1, 128, 4096, 2048, False),  # one token of it
        (64, 128, 4096, 2048, False),
        (32768, 36, 4096, 576, False),  # of SmolLM2-135M
        (32768, 32, 16384, 384, False),  # ultramem-v2 of Llama-3.2-1B
        (32768, 128, 1 << 20, 2048, False),
    ],
)
def test_the_product_is_expected_to_take_less_where_much_of_a_small_table_is_read(tokens, m, rows, width, expected):
    assert product_takes_less(tokens, m, rows, width) == expected


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32}, False),
        ({"tokens": 1}, False),
        ({"backend": "torch"}, False),
        ({"gathering": "rows"}, False),
        ({"gathering": "product", "dtype": torch.float32}, True),
    ],
    ids=str,
)
def test_what_chooses_it_on_a_gpu(change, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    asked = {"dtype": torch.bfloat16, "tokens": 32768, "backend": "triton", "gathering": "auto"}
    asked |= change
    with FakeTensorMode():
        bank = torch.empty(4096, 2048, dtype=asked["dtype"], device="cuda")
        slots = torch.empty(asked["tokens"], 128, dtype=torch.int64, device="cuda")
        found = multiplies_all(bank, slots, asked["backend"], asked["gathering"])
    assert found == expected


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does not look at slots")
@pytest.mark.parametrize("slot", [-1, 7])
def test_slots_that_are_no_rows_are_refused(slot, backend):
    bank, slots, weights = inputs(5, 3, 7, 4)
    slots[2, 1] = slot
    with pytest.raises(IndexError, match="the bank has 7 rows"):
        gathered(bank, slots, weights, backend)


def test_a_bank_without_rows_gives_no_tokens_their_nothing(backend):
    bank, slots, weights = torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    assert gathered(*(x.to(DEVICE) for x in (bank, slots, weights)), backend).shape == (0, 4)


def test_nothing_but_tensor_cores_chooses_it(monkeypatch):
    monkeypatch.setitem(weighted_gather.__globals__, "product_of_rows", None)  # which a call would find out
    if DEVICE == "cpu":
        weighted_gather(*inputs(300, 8, 4, 64, torch.bfloat16))
    weighted_gather(*inputs(300, 8, 4, 64))
