"""Gathered chapters give a bank the gradient of indexing, in rows, however many layers read."""

import torch

from midus_hf.ops.chapters.rows import chapter_rows

LAYERS = [torch.tensor([7, 0, 3]), torch.tensor([3, 9]), torch.tensor([0, 3, 8])]


def bank() -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter(torch.randn(40, 3, dtype=torch.float64, generator=generator))


def loss(table: torch.Tensor, gather) -> torch.Tensor:
    return sum((gather(table, chapters).square() * (number + 1)).sum() for number, chapters in enumerate(LAYERS))


def test_gradients_of_several_layers_add_up_to_that_of_indexing():
    expected, table = bank(), bank()
    loss(expected, lambda rows, chapters: rows.unflatten(0, (-1, 4))[chapters]).backward()
    for _ in range(2):  # gradients of two passes add up
        loss(table, lambda rows, chapters: chapter_rows(rows, chapters, 4)).backward()
    assert table.grad.is_sparse
    torch.testing.assert_close(table.grad.to_dense(), 2 * expected.grad)
    assert table.grad.coalesce().indices().shape[1] == 5 * 4
