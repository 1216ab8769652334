"""What bad requests to LESA get, what it warns of, and what an interrupted run leaves: nothing."""

import signal
import threading
import time

import pytest
import torch

from tests.upscalers.checkpoints import SMALL_MEMORY, read_tensors, record_of, save_base, write_tensors
from tests.upscalers.solvers.recording import Recorder
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale
from upscalers.solvers import layer_predictor

QUICK = ("--set", "epochs=1")
COLLAPSED = (
    r"predictions collapsed: their norm is below 0\.5 of their neighbours' \(.+\); they do little at the start\. "
    r"More epochs may predict more; a larger norm_weight gives predictions a norm, not a direction\."
)
UNRELATED = (
    r"predictions have a norm but no direction: their cosine to their neighbours' mean is below 0\.1 \(.+\), so that the "
    r"upscaled model begins far from the base\. Lower norm_weight, down to 0, or pass identity=auto\."
)
GUARDED = "the base's layers do not span all directions: query 5, gate 3 singular values lie under the guard and are left out."
STRICT = "It is an error since strict is set."


def request(*settings: str) -> list[str]:
    quick = () if any(setting.startswith("epochs=") for setting in settings) else QUICK
    return ["--method", "lesa", *quick, *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture
def narrow(tmp_path):
    """A base whose queries have five directions less than they could have, and whose gates three."""
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor[3:8] = 0
        elif "gate_proj" in name:
            tensor[40:43] = tensor[:3]
    write_tensors(base, tensors)
    return base


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_base_of_too_few_layers_to_learn_from_is_refused(num_layers, tmp_path, command, refused):
    base = save_base(tmp_path / "base", num_hidden_layers=num_layers)
    message = f"the base has {num_layers} layers; lesa needs at least 3, to learn a layer from the two around it."
    for rest in (["--dry-run"], ["--output", tmp_path / "out"]):
        refused(command("--base", base, *request(), "--placement", "1", *rest), message, ["base"])


def test_a_base_with_memory_is_refused_because_all_layers_are_learnt_from(base, tmp_path, command, refused):
    upscale(base=base, method="midus-hml", output=tmp_path / "memory", options=SMALL_MEMORY, verify=False)
    message = (
        "base layer 1 is a memory block; lesa learns from all layers, and expected each to have a feed-forward network. "
        "Upscale the base without memory first."
    )
    outcome = command("--base", tmp_path / "memory", *request(), "--placement", "3", "--output", tmp_path / "out")
    refused(outcome, message, ["memory"])


@pytest.mark.parametrize(
    ("method", "rest", "value"),
    [
        (request(), ["--no-verify"], "nan"),
        (["--method", "opt-deus"], ["--allow-nan"], "inf"),
        (["--method", "opt-deus", "--set", "solver=hungarian"], ["--no-verify"], "nan"),
    ],
)
def test_layers_are_not_made_from_what_is_not_finite(method, rest, value, tmp_path, command, refused):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.layers.2.mlp.gate_proj.weight"][0, 0] = float(value)
    write_tensors(base, tensors)
    message = (
        r"model\.layers\.2\.mlp\.gate_proj\.weight holds NaN or infinite values; expected finite weights, since new ones "
        r"are computed from them\. Repair the base\."
    )
    refused(command("--base", base, *method, *rest, "--output", tmp_path / "out"), message, ["base"])


def test_directions_under_the_guard_are_counted_in_a_warning_and_refused_under_strict(
    narrow, tmp_path, command, refused
):
    usual = ("--base", narrow, "--no-verify")
    told = command(*usual, *request("norm_weight=1", "epochs=3"), "--output", tmp_path / "out")
    assert told.status == 0
    assert f"upscale: warning: {GUARDED}" in told.err.splitlines()
    strict = command(*usual, *request("norm_weight=1", "epochs=60", "strict=true"), "--output", tmp_path / "strict")
    refused(strict, f"{GUARDED} {STRICT}", ["base", "out"])


def test_a_collapse_is_warned_of_with_the_worst_layer_of_each_matrix_and_refused_under_strict(
    base, tmp_path, command, refused
):
    recorder = Recorder()
    report = upscale(
        base=base,
        method="lesa",
        output=tmp_path / "out",
        options={"epochs": 1, "norm_weight": 0.0},
        verify=False,
        progress=recorder,
    )
    (warning,) = recorder.warnings
    for role in {row["tensor"] for row in report.measurements}:
        worst = min(row["norm_ratio"] for row in report.measurements if row["tensor"] == role)
        assert worst < 0.5 and f"{role} {worst:.2g}" in warning
    usual = ("--base", base, *request("norm_weight=0"), "--no-verify")
    strict = command(*usual, "--output", tmp_path / "strict", "--set", "strict=true")
    refused(strict, f"{COLLAPSED} {STRICT}", ["out"])


def test_noise_of_full_norm_is_warned_of_with_the_worst_layer_of_each_matrix_and_refused_under_strict(
    base, tmp_path, command, refused
):
    """The tiny base's layers are random, so that there is nothing to predict."""
    usual = ("--base", base, *request("norm_weight=1", "epochs=40"), "--no-verify")
    told = command(*usual, "--output", tmp_path / "out")
    assert told.status == 0
    (warning,) = [line for line in told.err.splitlines() if "no direction" in line]
    rows = record_of(tmp_path / "out")["measurements"]
    for role in {row["tensor"] for row in rows}:
        cosine = min(row["cosine_to_mean"] for row in rows if row["tensor"] == role)
        assert (f"{role} {cosine:.2g}" in warning) == (cosine < 0.1)
    strict = (*usual, "--set", "strict=true")
    refused(command(*strict, "--output", tmp_path / "strict"), f"{UNRELATED} {STRICT}", ["out"])
    assert command(*strict, "--set", "identity=auto", "--output", tmp_path / "identity").status == 0


def test_training_that_diverges_is_not_passed_over_in_silence(base, tmp_path):
    recorder, options = Recorder(), {"epochs": 1, "learning_rate": 1e30}
    try:
        upscale(base=base, method="lesa", output=tmp_path / "out", options=options, verify=False, progress=recorder)
    except RequestError:
        assert not any(tmp_path.iterdir())
    else:
        assert recorder.warnings, "weights that are NaN were written without a word"
    with pytest.raises(RequestError):
        strict = {**options, "strict": True}
        upscale(base=base, method="lesa", output=tmp_path / "strict", options=strict, verify=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_one_solver_stops_the_others_and_leaves_nothing(workers, base, tmp_path, command, monkeypatch):
    honest, calls = layer_predictor.train_predictor, []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return honest(*arguments, **options)

    monkeypatch.setattr(layer_predictor, "train_predictor", failing)
    outcome = command("--base", base, *request(f"workers={workers}"), "--output", tmp_path / "out", "--no-verify")
    assert outcome.status == 1
    assert outcome.err == "upscale: failed: OutOfMemoryError: no memory left\n"
    assert not any(tmp_path.iterdir())
    assert len(calls) < 7
    assert not any("solver" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("keyboard")
def test_interrupted_from_the_keyboard_nothing_is_left(workers, base, tmp_path, command, monkeypatch):
    honest, pressed = layer_predictor.train_predictor, threading.Lock()

    def interrupted(*arguments, **options):
        if pressed.acquire(blocking=False):
            time.sleep(0.2)  # by then all work is handed out
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return honest(*arguments, **options)

    monkeypatch.setattr(layer_predictor, "train_predictor", interrupted)
    long = request(f"workers={workers}", "epochs=3000")
    outcome = command("--base", base, *long, "--output", tmp_path / "out", "--no-verify")
    assert outcome.status == 130
    assert outcome.err == "upscale: interrupted\n"
    assert not any(tmp_path.iterdir())
    assert not any("solver" in thread.name for thread in threading.enumerate())


def test_three_layers_suffice(tmp_path):
    base = save_base(tmp_path / "base", num_hidden_layers=3)
    report = upscale(
        base=base, method="lesa", output=tmp_path / "out", placement="1,3", options={"epochs": 1}, verify=False
    )
    assert report.num_layers == 5 and len(report.measurements) == 14
