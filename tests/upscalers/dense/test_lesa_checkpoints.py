"""LESA on whole checkpoints: what is predicted, what is not, and the same bytes for the same seed."""

import json
import shutil

import pytest
import torch
from tiny import NUM_LAYERS

from tests.upscalers.checkpoints import read_tensors
from tests.upscalers.dense.layers import layer
from tests.upscalers.solvers.recording import Recorder
from upscalers.runs.upscale import upscale
from upscalers.solvers import layer_predictor

QUICK = {"epochs": 1}
HIDDEN_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
)
ROLES = ["query", "key", "value", "output_projection", "gate", "up", "down"]


def predicted(base, output, verify=False, seed=0, num_new_layers=2, **options):
    """The report, and what was told meanwhile."""
    recorder = Recorder()
    report = upscale(
        base=base,
        method="lesa",
        output=output,
        num_new_layers=num_new_layers,
        options=QUICK | options,
        seed=seed,
        verify=verify,
        progress=recorder,
    )
    return report, recorder


@pytest.mark.parametrize("norm_init", ["layer0", "previous", "next", "mean"])
def test_norms_are_taken_from_where_it_is_asked_and_all_other_vectors_are_means(
    native_family, norm_init, shared_base, tmp_path
):
    base = shared_base(native_family)
    predicted(base, tmp_path / "out", norm_init=norm_init)
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    for index, (previous, following) in {2: (1, 2), 4: (2, 3)}.items():
        made = layer(after, index)
        assert made.keys() == layer(before, 0).keys()
        vectors = [name for name, tensor in made.items() if tensor.dim() == 1]
        assert set(vectors) & set(HIDDEN_NORMS)
        for name in vectors:
            one, other = (layer(before, neighbour)[name] for neighbour in (previous, following))
            wanted = {"layer0": layer(before, 0)[name], "previous": one, "next": other}
            if name in HIDDEN_NORMS and norm_init != "mean":
                assert torch.equal(made[name], wanted[norm_init]), name
            else:
                torch.testing.assert_close(made[name], (one + other) / 2)


def test_all_seven_matrices_are_predicted_and_measured(native_family, shared_base, tmp_path):
    base = shared_base(native_family)
    report, recorder = predicted(base, tmp_path / "out")
    assert sorted((row["layer"], row["tensor"]) for row in report.measurements) == sorted(
        (index, role) for index in (2, 4) for role in ROLES
    )
    assert recorder.balanced and sorted(recorder.expected) == sorted(ROLES)
    before, made = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    for name, tensor in made.items():
        if tensor.dim() == 2:
            assert tensor.isfinite().all() and tensor.any()
            assert not any(torch.allclose(tensor, layer(before, index)[name]) for index in range(NUM_LAYERS))
    assert not report.promises_identity


@pytest.mark.parametrize(
    ("family", "options", "neighbours"),
    [
        ("llama", {}, {(1, 2), (2, 3)}),
        ("gemma2", {}, {(1, 2), (2, 3)}),
        ("gemma2", {"neighbours": "same_type"}, {(0, 2), (1, 3)}),
    ],
)
def test_each_new_layer_is_predicted_from_the_layer_before_and_the_one_after_in_this_order(
    family, options, neighbours, shared_base, tmp_path, monkeypatch
):
    asked, honest = [], layer_predictor.predict

    def watched(predictor, rows, previous, following, device):
        asked.append((previous, following))
        return honest(predictor, rows, previous, following, device)

    monkeypatch.setattr(layer_predictor, "predict", watched)
    predicted(shared_base(family), tmp_path / "out", **options)
    assert len(asked) == 14 and set(asked) == neighbours


def test_the_default_is_what_the_release_does(base, tmp_path):
    """Norms of layer 0, the released numbers, and nothing zeroed."""
    report, _ = predicted(base, tmp_path / "out")
    first, made = layer(read_tensors(base), 0), layer(read_tensors(tmp_path / "out"), 4)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        assert torch.equal(made[name], first[name])
    assert made["self_attn.o_proj.weight"].any() and made["mlp.down_proj.weight"].any()
    options = json.loads((tmp_path / "out" / "config.json").read_text())["upscale"]["options"]
    assert (options["norm_init"], options["identity"]) == ("layer0", "none")
    assert (options["norm_weight"], options["learning_rate"], options["batch_size"]) == (5e-4, 1e-3, 64)
    assert (options["hidden_size"], options["weight_decay"], options["neighbours"]) == (256, 0.01, "adjacent")
    assert not report.promises_identity


def test_room_for_the_coordinates_is_asked_for_before_the_work_begins(base, tmp_path, command, refused, monkeypatch):
    usual = ("--base", base, "--method", "lesa", "--no-verify", "--set", "epochs=1")
    written = command(*usual, "--dry-run", "--json").json()["bytes"]["written"]
    coordinates = 4 * sum(
        tensor.numel() for name, tensor in read_tensors(base).items() if ".layers." in name and tensor.dim() == 2
    )
    usage = shutil.disk_usage(tmp_path)
    for room, enough in ((written + coordinates, True), (written + coordinates // 2, False)):
        free = room + 64_000_000
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        outcome = command(*usual, "--output", tmp_path / "out")
        if enough:
            assert outcome.status == 0
            shutil.rmtree(tmp_path / "out")
        else:
            refused(outcome, "the output needs .* GB, but .* has .* GB free", [])
