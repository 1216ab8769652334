"""The predictor: starts as torch's own layers would, learns by the loss of the paper, and repeats itself."""

import math

import pytest
import torch
from torch import nn

from upscalers.solvers.layer_predictor import (
    LayerPredictor,
    PredictorTraining,
    num_steps,
    predict,
    predictor_loss,
    train_predictor,
)
from upscalers.solvers.shared_basis import RowFile

ROWS, LAYERS, WIDTH = 10, 6, 8
TRAINING = PredictorTraining(32, 3, 16, 1e-3, 0.01, 5e-4)


@pytest.fixture
def rows(tmp_path):
    """A file of rows, and what it holds [rows, layers, width]."""
    stored = torch.randn(ROWS, LAYERS, WIDTH, generator=torch.Generator().manual_seed(0)) / LAYERS**0.5
    with RowFile(tmp_path / "rows", ROWS, LAYERS, WIDTH) as file:
        for layer in range(LAYERS):
            file.write_layer(layer, stored[:, layer])
        yield file, stored


def trained(file, training=TRAINING, seed=0, done=lambda: None) -> LayerPredictor:
    generator = torch.Generator().manual_seed(seed)
    return train_predictor(file, ROWS, LAYERS, WIDTH, training, generator, "cpu", done)


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters(), strict=True))


def test_it_has_two_hidden_layers_with_relu_and_biases():
    predictor = LayerPredictor(WIDTH, 32, torch.Generator().manual_seed(0))
    shapes = [tuple(parameter.shape) for parameter in predictor.parameters()]
    assert shapes == [(32, 16), (32,), (32, 32), (32,), (8, 32), (8,)]
    (w1, b1, w2, b2, w3, b3), x = predictor.parameters(), torch.randn(5, 16)
    expected = torch.relu(torch.relu(x @ w1.mT + b1) @ w2.mT + b2) @ w3.mT + b3
    torch.testing.assert_close(predictor(x), expected)


def test_its_weights_start_as_those_of_torchs_linear_layers():
    predictor = LayerPredictor(600, 256, torch.Generator().manual_seed(0))
    for linear in (module for module in predictor.modules() if isinstance(module, nn.Linear)):
        torch.manual_seed(0)
        plain = nn.Linear(linear.in_features, linear.out_features)
        bound = 1 / math.sqrt(linear.in_features)
        for made, usual in ((linear.weight, plain.weight), (linear.bias, plain.bias)):
            assert made.abs().max() <= bound and made.abs().max() > 0.95 * bound
            assert made.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
            assert made.std().item() == pytest.approx(usual.std().item(), rel=0.2)
            assert abs(made.mean().item()) < 0.15 * bound


def test_it_starts_the_same_whatever_the_global_generator_did():
    first = LayerPredictor(WIDTH, 32, torch.Generator().manual_seed(3))
    torch.rand(7)
    state = torch.get_rng_state()
    assert same_weights(first, LayerPredictor(WIDTH, 32, torch.Generator().manual_seed(3)))
    assert not same_weights(first, LayerPredictor(WIDTH, 32, torch.Generator().manual_seed(4)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("norm_weight", [0.0, 5e-4, 0.3, 1.0])
def test_the_loss_adds_the_squared_difference_of_the_whole_batchs_norms(norm_weight):
    predicted, target = torch.randn(6, 4), torch.randn(6, 4)
    squared = sum((predicted[i, j] - target[i, j]) ** 2 for i in range(6) for j in range(4)) / 24
    norms = [math.sqrt(sum(x**2 for x in matrix.flatten().tolist())) for matrix in (predicted, target)]
    expected = (1 - norm_weight) * squared.item() + norm_weight * (norms[0] - norms[1]) ** 2
    assert predictor_loss(predicted, target, norm_weight).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_prediction_of_zeros_has_a_finite_gradient():
    predicted = torch.zeros(3, 4, requires_grad=True)
    predictor_loss(predicted, torch.ones(3, 4), 5e-4).backward()
    assert predicted.grad.isfinite().all() and predicted.grad.any()


def test_training_is_adamw_on_every_row_of_every_layer_with_neighbours(rows):
    """With all samples in one batch their order does not matter, so that a plain loop must give the same weights."""
    file, stored = rows
    training = PredictorTraining(32, 5, 1000, 1e-2, 0.1, 5e-2)
    expected = LayerPredictor(WIDTH, 32, torch.Generator().manual_seed(0)).layers
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1)
    samples = [(row, layer) for row in range(ROWS) for layer in range(1, LAYERS - 1)]
    x = torch.stack([torch.cat([stored[row, layer - 1], stored[row, layer + 1]]) for row, layer in samples])
    y = torch.stack([stored[row, layer] for row, layer in samples])
    for _ in range(5):
        output = expected(x)
        loss = 0.95 * (output - y).square().mean() + 0.05 * (output.norm() - y.norm()) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = trained(file, training)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_each_epoch_sees_every_sample_once_in_an_order_of_its_own(rows, monkeypatch):
    file, _ = rows
    batches, read = [], file.read

    def watched(places, num_layers):
        assert num_layers == 3
        batches.append(list(places))
        return read(places, num_layers)

    monkeypatch.setattr(file, "read", watched)
    steps = []
    trained(file, done=lambda: steps.append(1))
    assert len(steps) == len(batches) == num_steps(ROWS, LAYERS, TRAINING) == 3 * math.ceil(ROWS * 4 / 16)
    per_epoch = len(batches) // 3
    epochs = [[place for batch in batches[e * per_epoch : (e + 1) * per_epoch] for place in batch] for e in range(3)]
    everything = [(row, first) for row in range(ROWS) for first in range(LAYERS - 2)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, everything]}) == 4
    assert {len(batch) for batch in batches} == {16, 8}


def test_the_same_seed_trains_the_same_weights_and_another_seed_others(rows):
    file, _ = rows
    first = trained(file)
    torch.rand(3)
    assert same_weights(first, trained(file))
    assert not same_weights(first, trained(file, seed=1))


def test_a_prediction_is_made_row_by_row_from_the_layer_before_and_the_one_after(tmp_path):
    num_rows = 2500  # more than are predicted at once
    stored = torch.randn(num_rows, 3, 4, generator=torch.Generator().manual_seed(0))
    predictor = LayerPredictor(4, 16, torch.Generator().manual_seed(0))
    with RowFile(tmp_path / "rows", num_rows, 3, 4) as file:
        for layer in range(3):
            file.write_layer(layer, stored[:, layer])
        for previous, following in ((0, 1), (1, 2), (2, 0)):
            found = predict(predictor, file, num_rows, 4, previous, following, "cpu")
            expected = predictor(torch.cat([stored[:, previous], stored[:, following]], dim=1))
            torch.testing.assert_close(found, expected)
            assert not found.requires_grad
