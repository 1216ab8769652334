"""LESA predicts layers that can be predicted, and says where they cannot be."""

import math

import pytest
import torch

from tests.upscalers.solvers.recording import memory_base, solved
from upscalers.architecture.family import Projection
from upscalers.methods.contract import get_method
from upscalers.methods.lesa import MatrixPrediction
from upscalers.request.errors import RequestError
from upscalers.request.options import parse_options
from upscalers.solvers.layer_predictor import new_predictor
from upscalers.tensors.recipes import tensor_seed

LAYERS, SIZE = 16, 64
GAPS = {8: (7, 8), 10: (8, 9)}


def random_matrices(count: int, out: int = SIZE, width: int = SIZE, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out, width, generator=generator) * 0.02 for _ in range(count)]


def turning(angle: float) -> list[torch.Tensor]:
    """Layers on a circle through two unrelated matrices: each is between its neighbours, of the same norm."""
    one, other = random_matrices(2)
    return [math.cos(angle * layer) * one + math.sin(angle * layer) * other for layer in range(LAYERS)]


def predicted(layers, tmp_path, gaps=GAPS, seed=0, **options):
    """The new matrices by index, and what was measured."""
    base = memory_base(len(layers), hidden_size=SIZE, intermediate_size=SIZE, num_attention_heads=4)
    chosen = parse_options(get_method("lesa").options_class, options, "lesa")
    matrix = Projection("query", "self_attn.q_proj.weight", tuple(layers[0].shape))
    solver = MatrixPrediction(base, matrix, gaps, seed, chosen)
    made = solved(solver, tmp_path, lambda full: layers[int(full.partition(".")[0])])
    assert not any(tmp_path.iterdir())
    return {int(index): matrix for index, matrix in made.items()}, {row["layer"]: row for row in solver.measurements}


def test_a_prediction_is_the_basis_times_what_the_predictor_makes_of_the_neighbours_coordinates(tmp_path):
    """The method written out, through the decomposition of all layers side by side."""
    layers = [matrix.double() for matrix in random_matrices(5, 12, 20)]
    joined = torch.cat(layers, dim=1)
    u, s, vt = torch.linalg.svd(joined, full_matrices=False)
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    u, vt = u * signs, vt * signs.mT
    parts = [part.float() for part in vt.split(20, dim=1)]
    options = {"epochs": 4, "batch_size": 1000, "hidden_size": 32, "learning_rate": 1e-2, "norm_weight": 5e-4}
    made, _ = predicted([layer.float() for layer in layers], tmp_path, {2: (1, 2)}, seed=5, **options)

    seed = tensor_seed(5, "lesa:self_attn.q_proj.weight")
    network = new_predictor(20, 32, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
    x = torch.cat([torch.cat([parts[layer - 1], parts[layer + 1]], dim=1) for layer in (1, 2, 3)])
    y = torch.cat(parts[1:4])
    for _ in range(4):
        output = network(x)
        loss = (1 - 5e-4) * (output - y).square().mean() + 5e-4 * (output.norm() - y.norm()).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = (u * s).float() @ network(torch.cat([parts[1], parts[2]], dim=1)).detach()
    torch.testing.assert_close(made[2], expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_what_is_measured_is_true_of_what_was_made(tmp_path):
    layers = turning(0.15)
    made, rows = predicted(layers, tmp_path)
    for index, (previous, following) in GAPS.items():
        norms = (layers[previous].norm() + layers[following].norm()) / 2
        middle = (layers[previous] + layers[following]).flatten() / 2
        cosine = torch.dot(made[index].flatten(), middle) / made[index].norm() / middle.norm()
        assert rows[index]["norm_ratio"] == pytest.approx((made[index].norm() / norms).item(), rel=1e-4)
        assert rows[index]["cosine_to_mean"] == pytest.approx(cosine.item(), rel=1e-4)
        assert (rows[index]["tensor"], rows[index]["directions_left_out"]) == ("query", 0)
        assert rows[index]["seconds"] > 0


@pytest.mark.parametrize("angle", [0.0, 0.05, 0.15])
def test_layers_that_change_smoothly_are_predicted_and_constant_ones_return(angle, tmp_path):
    layers = turning(angle)
    made, rows = predicted(layers, tmp_path)
    for index, (previous, following) in GAPS.items():
        assert 0.8 < rows[index]["norm_ratio"] < 1.2
        assert rows[index]["cosine_to_mean"] > 0.9
        middle = (layers[previous] + layers[following]) / 2
        assert (made[index] - middle).norm() < 0.45 * middle.norm()


def test_unrelated_layers_are_not_predicted(tmp_path):
    _, rows = predicted(random_matrices(LAYERS), tmp_path)
    assert all(row["cosine_to_mean"] < 0.3 for row in rows.values())


def test_without_the_norm_loss_predictions_collapse(tmp_path):
    layers = random_matrices(LAYERS)
    _, without = predicted(layers, tmp_path, norm_weight=0.0)
    _, little = predicted(layers, tmp_path, norm_weight=5e-5)
    _, usual = predicted(layers, tmp_path)
    for index in GAPS:
        ratios = [rows[index]["norm_ratio"] for rows in (without, little, usual)]
        assert ratios == sorted(ratios)
        assert ratios[0] < 0.25 < 0.5 < ratios[2]


def test_directions_that_no_layer_has_stay_empty(tmp_path):
    layers = random_matrices(6)
    for matrix in layers:
        matrix[10:15] = 0
    made, rows = predicted(layers, tmp_path, {3: (2, 3)})
    assert rows[3]["directions_left_out"] == 5
    assert made[3].shape == (SIZE, SIZE)
    assert made[3][10:15].abs().max() < 1e-6 * made[3].abs().max()


def test_a_matrix_that_is_zero_in_some_layers_is_still_learnt_from(tmp_path):
    """As the output projection is after LLaMA-Pro."""
    layers = random_matrices(8)
    layers[3], layers[6] = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    made, rows = predicted(layers, tmp_path, {3: (2, 3), 4: (3, 4)})
    assert all(matrix.isfinite().all() and matrix.any() for matrix in made.values())
    assert all(math.isfinite(value) for row in rows.values() for value in row.values() if not isinstance(value, str))


def test_a_matrix_that_is_zero_in_all_layers_is_refused_by_name(tmp_path):
    message = "0.self_attn.q_proj.weight and its like are zero in every layer; lesa has nothing to learn from"
    with pytest.raises(RequestError, match=message):
        predicted([torch.zeros(SIZE, SIZE)] * 4, tmp_path, {2: (1, 2)})


def test_between_two_layers_of_zeros_no_measurement_is_infinite(tmp_path):
    layers = random_matrices(8)
    layers[3], layers[4] = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    _, rows = predicted(layers, tmp_path, {4: (3, 4)})
    assert math.isfinite(rows[4]["norm_ratio"]) and math.isfinite(rows[4]["cosine_to_mean"])
