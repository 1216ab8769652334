"""The basis that layers share is a singular value decomposition, and the predictor starts and learns as it should."""

import itertools
import math

import pytest
import torch
from torch import nn

from upscalers.methods.lesa import LesaOptions
from upscalers.tensors.layer_predictor import RowFile, new_predictor, predict, shared_basis, train_predictor

ROWS, LAYERS, WIDTH = 10, 6, 8


@pytest.fixture
def rows(tmp_path):
    """A file of rows, and what it holds [rows, layers, width]."""
    stored = torch.randn(ROWS, LAYERS, WIDTH, generator=torch.Generator().manual_seed(0)) / LAYERS**0.5
    with RowFile(tmp_path / "rows", ROWS, LAYERS, WIDTH) as file:
        for layer in range(LAYERS):
            file.write_layer(layer, stored[:, layer])
        yield file, stored


def test_epochs_see_every_sample_once(rows, monkeypatch):
    file, _ = rows
    batches, read, steps = [], file.read, []

    def watched(places, num_layers):
        assert num_layers == 3
        batches.append(list(places))
        return read(places, num_layers)

    monkeypatch.setattr(file, "read", watched)
    options = LesaOptions(hidden_size=32, epochs=3, batch_size=16)
    train_predictor(file, torch.Generator().manual_seed(0), options, lambda: steps.append(1))
    assert len(steps) == len(batches) == 3 * math.ceil(ROWS * 4 / 16) and {len(batch) for batch in batches} == {16, 8}
    samples, everything = (
        [*itertools.chain(*batches)],
        [(row, first) for row in range(ROWS) for first in range(LAYERS - 2)],
    )
    epochs = [samples[start : start + len(everything)] for start in range(0, len(samples), len(everything))]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, everything]}) == 4


def test_weights_start_as_in_torch():
    predictor = new_predictor(600, 256, torch.Generator().manual_seed(0))
    for linear in (module for module in predictor.modules() if isinstance(module, nn.Linear)):
        bound = 1 / math.sqrt(linear.in_features)
        for made in (linear.weight, linear.bias):
            assert 0.95 * bound < made.abs().max() <= bound
            assert made.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
            assert abs(made.mean().item()) < 0.15 * bound


def test_rows_are_predicted_from_both_neighbours(tmp_path):
    num_rows = 2500  # more than are predicted at once
    stored = torch.randn(num_rows, 3, 4, generator=torch.Generator().manual_seed(0))
    predictor = new_predictor(4, 16, torch.Generator().manual_seed(0))
    with RowFile(tmp_path / "rows", num_rows, 3, 4) as file:
        for layer in range(3):
            file.write_layer(layer, stored[:, layer])
        for previous, following in ((0, 1), (1, 2), (2, 0)):
            actual = predict(predictor, file, previous, following, "cpu")
            expected = predictor(torch.cat([stored[:, previous], stored[:, following]], dim=1))
            torch.testing.assert_close(actual, expected)
            assert not actual.requires_grad


def layers(count: int = 5, out: int = 12, width: int = 20, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out, width, generator=generator, dtype=torch.float64) for _ in range(count)]


def basis_of(matrices):
    return shared_basis(len(matrices), lambda layer: matrices[layer], lambda: None)


@pytest.mark.parametrize(("count", "out", "width"), [(5, 12, 20), (3, 30, 10), (3, 40, 7)])
def test_shared_basis_equals_the_svd(count, out, width):
    matrices = layers(count, out, width)
    joined = torch.cat(matrices, dim=1)
    u, s, vt = torch.linalg.svd(joined, full_matrices=False)
    basis = basis_of(matrices)
    assert basis.vectors.shape == u.shape and basis.num_left_out == 0
    torch.testing.assert_close(basis.values, s, rtol=1e-7, atol=0)
    signs = (u * basis.vectors).sum(0).sign()
    torch.testing.assert_close(basis.vectors, u * signs, rtol=0, atol=1e-7)
    for layer, matrix in enumerate(matrices):
        coordinates = basis.coordinates(matrix)
        expected = signs[:, None] * vt[:, layer * width : (layer + 1) * width]
        torch.testing.assert_close(coordinates, expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(basis.matrix(coordinates), matrix, rtol=0, atol=1e-12)
    rows = torch.cat([basis.coordinates(matrix) for matrix in matrices], dim=1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_shared_basis_is_independent_of_signs(seed, monkeypatch):
    matrices = layers()
    expected, decompose = basis_of(matrices), torch.linalg.eigh
    flipped = []

    def other_signs(gram):
        values, vectors = decompose(gram)
        signs = torch.randint(0, 2, (len(values),), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        flipped.append((signs < 0).sum().item())
        return values, vectors * signs

    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    actual = basis_of(matrices)
    assert flipped[0] > 0
    assert torch.equal(actual.vectors, expected.vectors) and torch.equal(actual.values, expected.values)


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_missing_directions_are_left_out(rank):
    generator = torch.Generator().manual_seed(1)
    span = torch.randn(12, rank, generator=generator, dtype=torch.float64)
    matrices = [span @ torch.randn(rank, 20, generator=generator, dtype=torch.float64) for _ in range(4)]
    basis = basis_of(matrices)
    assert (len(basis.values), basis.num_left_out) == (rank, 12 - rank)
    for matrix in matrices:
        coordinates = basis.coordinates(matrix)
        assert coordinates.abs().max() <= 1 + 1e-9
        torch.testing.assert_close(basis.matrix(coordinates), matrix, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("share", "kept"), [(3e-6, True), (3e-7, False)])
def test_singular_guard_is_a_millionth(share, kept):
    matrices = layers(out=6, width=8)
    u, s, vt = torch.linalg.svd(torch.cat(matrices, dim=1), full_matrices=False)
    s[-1] = share * s[0]
    basis = basis_of(list(((u * s) @ vt).split(8, dim=1)))
    assert basis.num_left_out == (0 if kept else 1)


def test_short_row_file_is_an_error(tmp_path):
    with RowFile(tmp_path / "rows", 2, 3, 4) as rows:
        rows.write_layer(0, torch.ones(2, 4))
        with pytest.raises(OSError, match="a temporary file ended early"):
            rows.read([(1, 0)], 3)
