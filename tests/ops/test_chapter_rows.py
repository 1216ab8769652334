"""Gathered chapters give a bank the gradient of indexing, of rows or dense, however many layers read."""

import pytest
import torch

from midus_hf.ops.chapters.rows import chapter_rows, with_one_gradient

LAYERS = [torch.tensor([7, 0, 3]), torch.tensor([3, 9]), torch.tensor([0, 3, 8])]


def bank() -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter(torch.randn(40, 3, dtype=torch.float64, generator=generator))


def loss(table: torch.Tensor, gather) -> torch.Tensor:
    return sum((gather(table, chapters).square() * (number + 1)).sum() for number, chapters in enumerate(LAYERS))


@pytest.mark.parametrize("is_dense", [False, True])
def test_gradients_of_several_layers_add_up_to_that_of_indexing(is_dense):
    expected, table = bank(), bank()
    loss(expected, lambda rows, chapters: rows.unflatten(0, (-1, 4))[chapters]).backward()
    for _ in range(2):  # gradients of two passes add up
        read = with_one_gradient(table) if is_dense else table
        loss(read, lambda rows, chapters: chapter_rows(rows, chapters, 4)).backward()
    assert table.grad.is_sparse != is_dense
    torch.testing.assert_close(table.grad if is_dense else table.grad.to_dense(), 2 * expected.grad)
    if not is_dense:
        assert table.grad.coalesce().indices().shape[1] == 5 * 4


def test_a_reader_of_the_whole_bank_may_be_among_them():
    expected, table = bank(), bank()
    (expected.unflatten(0, (-1, 4))[LAYERS[0]].square().sum() + expected.square().sum()).backward()
    shared = with_one_gradient(table)
    (chapter_rows(shared, LAYERS[0], 4).square().sum() + shared.square().sum()).backward()
    torch.testing.assert_close(table.grad, expected.grad)


def test_gradients_pass_a_numerical_check():
    assert torch.autograd.gradcheck(lambda table: chapter_rows(with_one_gradient(table), LAYERS[0], 4), bank())
