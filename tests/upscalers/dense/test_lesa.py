"""LESA predicts layers that can be predicted, says where they cannot be, and has an SVD as basis."""

import dataclasses
import itertools
import math
import re
import shutil
import signal

import pytest
import torch
from tiny import NUM_LAYERS
from torch import nn

from tests.upscalers.checkpoints import Recorder, save_base, write_tensors
from tests.upscalers.contents import layer, read_tensors, record_of
from tests.upscalers.methods import known
from tests.upscalers.methods import upscaled as requested
from upscalers.architecture.layer_tensors import Projection
from upscalers.methods.contract import get_method
from upscalers.methods.lesa import LesaOptions, MatrixPrediction
from upscalers.request import parse_options
from upscalers.tensors import layer_predictor
from upscalers.tensors.layer_predictor import RowFile, new_predictor, predict, shared_basis, train_predictor
from upscalers.tensors.recipes import Scratch, tensor_seed

LAYERS, SIZE = 16, 64
GAPS = {8: (7, 8), 10: (8, 9)}
QUERY = "self_attn.q_proj.weight"


def random_matrices(count: int, out: int = SIZE, width: int = SIZE, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out, width, generator=generator) * 0.02 for _ in range(count)]


def turning(angle: float) -> list[torch.Tensor]:
    """Layers on a circle through two unrelated matrices: each is between its neighbours, of the same norm."""
    one, other = random_matrices(2)
    return [math.cos(angle * layer) * one + math.sin(angle * layer) * other for layer in range(LAYERS)]


def predicted(layers, tmp_path, gaps=GAPS, seed=0, **options):
    config = {"vocab_size": 16, "hidden_size": SIZE, "intermediate_size": SIZE, "num_attention_heads": 4}
    stored = {f"model.layers.{index}.{QUERY}": matrix for index, matrix in enumerate(layers)}
    base = known({"model_type": "llama", "num_hidden_layers": len(layers), **config})
    base, recorder = dataclasses.replace(base, tensors=dict.fromkeys(stored)), Recorder()
    chosen = parse_options(get_method("lesa").options_class, options, "lesa")
    solver = MatrixPrediction(base, Projection("query", QUERY, tuple(layers[0].shape)), gaps, seed, chosen)
    made = dict(solver.solve(Scratch(stored.__getitem__, tmp_path, recorder)))
    assert recorder.balanced
    assert len(recorder.stages) == 1
    assert not any(tmp_path.iterdir())
    return {int(index): matrix for index, matrix in made.items()}, {row["layer"]: row for row in solver.measurements}


def test_prediction_equals_the_published_equations(tmp_path):
    """The method written out, through the decomposition of all layers side by side."""
    layers = [matrix.double() for matrix in random_matrices(5, 12, 20)]
    joined = torch.cat(layers, dim=1)
    u, s, vt = torch.linalg.svd(joined, full_matrices=False)
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    u, vt = u * signs, vt * signs.mT
    parts = [part.float() for part in vt.split(20, dim=1)]
    options = {"epochs": 4, "batch_size": 1000, "hidden_size": 32, "learning_rate": 1e-2, "norm_weight": 5e-4}
    made, _ = predicted([layer.float() for layer in layers], tmp_path, {2: (1, 2)}, seed=5, **options)
    seed = tensor_seed(5, f"lesa:{QUERY}")
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


def test_measurements_are_those_of_the_predictions(tmp_path):
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


def test_matrix_of_zeros_in_every_layer_is_refused(tmp_path):
    """As the output projection is after LLaMA-Pro."""
    layers = random_matrices(8)
    layers[3], layers[4], layers[6] = (torch.zeros(SIZE, SIZE) for _ in range(3))
    made, rows = predicted(layers, tmp_path, {3: (2, 3), 4: (3, 4)})
    assert all(matrix.isfinite().all() and matrix.any() for matrix in made.values())
    assert all(math.isfinite(value) for row in rows.values() for value in row.values() if not isinstance(value, str))
    with pytest.raises(ValueError, match=r"q_proj.weight .* are zero in every layer; lesa has nothing"):
        predicted([torch.zeros(SIZE, SIZE)] * 4, tmp_path, {2: (1, 2)})


HIDDEN_NORMS = tuple(f"{name}.weight" for name in (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
))  # fmt: skip
ROLES = ["query", "key", "value", "output_projection", "gate", "up", "down"]
COLUMNS = ["norm_ratio", "cosine_to_mean", "directions_left_out", "seconds"]


def upscaled(base, output, **options):
    recorder, options = Recorder(), {"epochs": 1} | options
    return requested(base, output, "lesa", num_new_layers=2, options=options, progress=recorder), recorder


INITS = {"layer0": "olmo2", "previous": "qwen2", "next": "gemma3", "mean": "mistral"}


@pytest.mark.parametrize(("norm_init", "family"), INITS.items())
def test_norm_init_selects_the_source(norm_init, family, shared_base, tmp_path):
    base = shared_base(family)
    report, recorder = upscaled(base, tmp_path / "out", norm_init=norm_init)
    assert recorder.balanced
    assert {*recorder.names} >= {f"predicting {role}" for role in ROLES}
    measured = sorted((row["layer"], row["tensor"]) for row in report.measurements)
    assert measured == sorted((index, role) for index in (2, 4) for role in ROLES)
    assert all(list(row)[2:] == COLUMNS for row in report.measurements)
    assert not report.promises_identity
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    for index, (previous, following) in {2: (1, 2), 4: (2, 3)}.items():
        made = layer(after, index)
        assert made.keys() == layer(before, 0).keys(), index
        assert {*made} & {*HIDDEN_NORMS}, index
        for name, tensor in made.items():
            one, other = (layer(before, neighbour)[name] for neighbour in (previous, following))
            wanted = {"layer0": layer(before, 0)[name], "previous": one, "next": other}
            if tensor.dim() == 2:
                assert tensor.isfinite().all()
                assert tensor.any()
                assert not any(torch.allclose(tensor, layer(before, each)[name]) for each in range(NUM_LAYERS))
            elif name in HIDDEN_NORMS and norm_init != "mean":
                assert torch.equal(tensor, wanted[norm_init]), name
            else:
                torch.testing.assert_close(tensor, (one + other) / 2)


@pytest.mark.parametrize(
    ("family", "options", "neighbours"),
    [("llama", {}, {(1, 2), (2, 3)}), ("gemma2", {"neighbours": "same_type"}, {(0, 2), (1, 3)})],
)
def test_prediction_reads_both_neighbours_in_order(family, options, neighbours, shared_base, tmp_path, monkeypatch):
    pairs, threads, honest, before = [], set(), layer_predictor.predict, torch.get_num_threads()

    def watched(predictor, rows, previous, following, device):
        pairs.append((previous, following))
        threads.add(torch.get_num_threads())
        return honest(predictor, rows, previous, following, device)

    monkeypatch.setattr(layer_predictor, "predict", watched)
    try:
        torch.set_num_threads(3)
        upscaled(shared_base(family), tmp_path / "out", **options)
        assert (threads, torch.get_num_threads()) == ({1}, 3), "solvers compute on one thread"
    finally:
        torch.set_num_threads(before)
    assert len(pairs) == 14
    assert set(pairs) == neighbours


def test_lesa_defaults_are_those_of_the_release(tmp_path):
    report, _ = upscaled(save_base(tmp_path / "base", num_hidden_layers=3), tmp_path / "out")
    assert report.num_layers == 5
    assert len(report.measurements) == 14
    made = layer(read_tensors(tmp_path / "out"), report.new_layer_indices[-1])
    assert made["self_attn.o_proj.weight"].any()
    assert made["mlp.down_proj.weight"].any()
    released = {"norm_init": "layer0", "identity": "none", "norm_weight": 5e-4, "learning_rate": 1e-3}
    released |= {"batch_size": 64, "hidden_size": 256, "weight_decay": 0.01, "neighbours": "adjacent"}
    assert record_of(tmp_path / "out")["options"].items() >= released.items()


def test_lesa_scratch_space_is_checked_first(base, tmp_path, command, refused, monkeypatch):
    usual = ("--base", base, *request(), "--no-verify")
    written = command(*usual, "--dry-run", "--json").json()["bytes"]["written"]
    matrices = [tensor for name, tensor in read_tensors(base).items() if ".layers." in name and tensor.dim() == 2]
    coordinates, usage = 4 * sum(matrix.numel() for matrix in matrices), shutil.disk_usage(tmp_path)
    for room in (coordinates // 2, coordinates):
        free = usage._replace(free=written + room + 64_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: free)
        outcome = command(*usual, "--output", tmp_path / "out")
        if room < coordinates:
            refused(outcome, "the output needs .* GB, but .* has .* GB free", [])
    assert outcome.status == 0


def request(*settings: str) -> list[str]:
    quick = () if any(setting.startswith("epochs=") for setting in settings) else ("epochs=1",)
    return ["--method", "lesa", *(word for setting in (*quick, *settings) for word in ("--set", setting))]


WARNED = {
    "collapse": (["norm_weight=0"], "norm_ratio", 0.5, r"norms below 0\.5 of their neighbours' \(.+\); .* More epochs"),
    "noise of full norm": (["norm_weight=1", "epochs=40"], "cosine_to_mean", 0.1,
                           r"mean is below 0\.1 \(.+\), .* Lower norm_weight, .* identity=auto"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "measured", "limit", "message"), WARNED.values(), ids=WARNED)
def test_bad_predictions_are_warned_of_per_matrix(settings, measured, limit, message, base, tmp_path, command):
    """The tiny base's layers are random, so that there is nothing to predict."""
    usual = ("--base", base, *request(*settings), "--no-verify")
    done = command(*usual, "--output", tmp_path / "out").succeeded()
    (warning,) = [line for line in done.err.splitlines() if re.search(message, line)]
    rows = record_of(tmp_path / "out")["measurements"]
    for role in {row["tensor"] for row in rows}:
        worst = min(row[measured] for row in rows if row["tensor"] == role)
        assert (f"{role} {worst:.2g}" in warning) == (worst < limit)
    if measured == "cosine_to_mean":
        done = command(*usual, "--set", "identity=auto", "--output", tmp_path / "identity").succeeded()
        assert not re.search(message, done.err)


def test_missing_directions_are_warned_of(tmp_path, command):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor[3:8] = 0
        elif "gate_proj" in name:
            tensor[40:43] = tensor[:3]
    write_tensors(base, tensors)
    done = command("--base", base, "--no-verify", *request("norm_weight=1"), "--output", tmp_path / "out").succeeded()
    assert "do not span all directions: query 5, gate 3 singular values are below" in done.err


@pytest.mark.parametrize("stop", [torch.OutOfMemoryError("no memory left"), None], ids=["an error", "the keyboard"])
def test_stopped_solver_leaves_nothing(stop, base, tmp_path, command, monkeypatch):
    honest, calls = layer_predictor.train_predictor, []

    def stopping(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            if stop is None:
                signal.raise_signal(signal.SIGINT)
            raise stop
        return honest(*arguments, **options)

    monkeypatch.setattr(layer_predictor, "train_predictor", stopping)
    done = command("--base", base, *request(), "--output", tmp_path / "out", "--no-verify")
    message = "failed: OutOfMemoryError: no memory left" if stop else "interrupted"
    assert (done.status, done.err.splitlines()[0]) == (1 if stop else 130, f"upscale: {message}")
    assert not any(tmp_path.iterdir())


ROWS, STORED, WIDTH = 10, 6, 8


@pytest.fixture
def rows(tmp_path):
    stored = torch.randn(ROWS, STORED, WIDTH, generator=torch.Generator().manual_seed(0)) / STORED**0.5
    with RowFile(tmp_path / "rows", ROWS, STORED, WIDTH) as file:
        for layer in range(STORED):
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
    assert len(steps) == len(batches) == 3 * math.ceil(ROWS * 4 / 16)
    assert {len(batch) for batch in batches} == {16, 8}
    samples = [*itertools.chain(*batches)]
    everything = [(row, first) for row in range(ROWS) for first in range(STORED - 2)]
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
            assert not actual.requires_grad, previous


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
    assert (basis.vectors.shape, basis.num_left_out) == (u.shape, 0)
    torch.testing.assert_close(basis.values, s, rtol=1e-7, atol=0)
    signs = (u * basis.vectors).sum(0).sign()
    torch.testing.assert_close(basis.vectors, u * signs, rtol=0, atol=1e-7)
    for number, matrix in enumerate(matrices):
        coordinates = basis.coordinates(matrix)
        expected = signs[:, None] * vt[:, number * width : (number + 1) * width]
        torch.testing.assert_close(coordinates, expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(basis.matrix(coordinates), matrix, rtol=0, atol=1e-12)
    rows = torch.cat([basis.coordinates(matrix) for matrix in matrices], dim=1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=1e-9)


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
