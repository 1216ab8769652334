"""The basis through the Gram matrix is the singular value decomposition of the layers side by side."""

import os

import pytest
import torch

from upscalers.solvers.shared_basis import RowFile, shared_basis


def layers(count: int = 5, out: int = 12, width: int = 20, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out, width, generator=generator, dtype=torch.float64) for _ in range(count)]


def basis_of(matrices):
    return shared_basis(len(matrices), lambda layer: matrices[layer])


@pytest.mark.parametrize(("count", "out", "width"), [(5, 12, 20), (3, 30, 10), (4, 16, 16), (3, 40, 7)])
def test_the_gram_route_equals_the_singular_value_decomposition_of_the_layers_side_by_side(count, out, width):
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


def test_singular_values_descend_and_the_largest_entry_of_each_vector_is_positive():
    basis = basis_of(layers())
    assert (basis.values.diff() < 0).all()
    largest = basis.vectors.gather(0, basis.vectors.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_result_does_not_depend_on_the_signs_that_the_library_chooses(seed, monkeypatch):
    matrices = layers()
    expected, decompose = basis_of(matrices), torch.linalg.eigh
    flipped = []

    def other_signs(gram):
        values, vectors = decompose(gram)
        signs = torch.randint(0, 2, (len(values),), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        flipped.append((signs < 0).sum().item())
        return values, vectors * signs

    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    found = basis_of(matrices)
    assert flipped[0] > 0
    assert torch.equal(found.vectors, expected.vectors) and torch.equal(found.values, expected.values)


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_directions_that_no_layer_has_are_left_out_and_counted(rank):
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
def test_the_guard_lies_at_a_millionth_of_the_largest_value(share, kept):
    matrices = layers(out=6, width=8)
    u, s, vt = torch.linalg.svd(torch.cat(matrices, dim=1), full_matrices=False)
    s[-1] = share * s[0]
    basis = basis_of(list(((u * s) @ vt).split(8, dim=1)))
    assert basis.num_left_out == (0 if kept else 1)


def test_layers_of_zeros_have_no_basis():
    basis = basis_of([torch.zeros(4, 6, dtype=torch.float64)] * 3)
    assert (len(basis.values), basis.num_left_out) == (0, 4)


def test_one_layer_is_read_at_a_time_and_progress_is_told_after_each():
    matrices, told = layers(), []

    def read(layer):
        told.append(layer)
        return matrices[layer]

    shared_basis(len(matrices), read, lambda: told.append("done"))
    assert told == [step for layer in range(5) for step in (layer, "done")] + ["done"]


def test_coordinates_go_to_the_file_and_come_back(tmp_path):
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(7, 5, 11, generator=generator)  # rows, layers, width
    path = tmp_path / "query.rows"
    with RowFile(path, 7, 5, 11) as rows:
        for layer in (3, 0, 4, 1, 2):
            rows.write_layer(layer, stored[:, layer].double())
        assert path.stat().st_size == 4 * stored.numel()
        found = rows.read([(6, 0), (0, 2), (3, 1), (0, 2)], 3)
        assert torch.equal(found, torch.stack([stored[6, 0:3], stored[0, 2:5], stored[3, 1:4], stored[0, 2:5]]))
        for layer in range(5):
            assert torch.equal(rows.read([(row, layer) for row in range(7)], 1)[:, 0], stored[:, layer])
        assert rows.read([], 3).shape == (0, 3, 11)
    assert not path.exists()


def test_the_file_is_removed_after_an_error_too(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), RowFile(tmp_path / "rows", 2, 3, 4):
        raise RuntimeError("stop")
    assert os.listdir(tmp_path) == []


def test_a_file_that_ends_early_is_an_error_and_not_zeros(tmp_path):
    with RowFile(tmp_path / "rows", 2, 3, 4) as rows:
        rows.write_layer(0, torch.ones(2, 4))
        with pytest.raises(OSError, match="a temporary file ended early"):
            rows.read([(1, 0)], 3)
