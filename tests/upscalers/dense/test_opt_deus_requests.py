"""What bad requests to OpT-DeUS get, and machines without what it needs."""

import importlib.util
import os

import pytest

from tests.upscalers.checkpoints import save_base
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale
from upscalers.solvers.devices import check_device

NUMBERS = [
    ("regularization=0", r"regularization is 0\.0; expected a number above 0\."),
    ("regularization=-1", r"regularization is -1\.0; expected a number above 0\."),
    ("regularization=.inf", r"regularization is inf; expected a number\."),
    ("regularization=.nan", r"regularization is nan; expected a number\."),
    ("regularization=much", "regularization is 'much'; expected a number."),
    ("tolerance=0", r"tolerance is 0\.0; expected a number above 0\."),
    ("tolerance=-1e-4", r"tolerance is -0\.0001; expected a number above 0\."),
    ("max_iterations=0", "max_iterations is 0; expected at least 1."),
    ("max_iterations=1.5", r"max_iterations is 1\.5; expected a whole number"),
    ("workers=0", "workers is 0; expected at least 1."),
    ("workers=two", "workers is 'two'; expected a whole number"),
]
CHOICES = [
    ("solver=exact", "solver is 'exact'; expected one of: sinkhorn, hungarian."),
    ("plan_scale=none", "plan_scale is 'none'; expected one of: barycentric, raw."),
    ("mlp_t_in=identity", "mlp_t_in is 'identity'; expected one of: o_proj, residual_mean."),
    ("precision=bfloat16", "precision is 'bfloat16'; expected one of: float64, float32."),
    ("identity=zero", "identity is 'zero'; expected one of: auto, zero_out_proj, zero_out_norm, none."),
    ("identity=zero_out_norm", "identity is 'zero_out_norm', but llama has no norm behind its projections"),
    ("neighbours=other", "neighbours is 'other'; expected one of: adjacent, same_type."),
    ("head_aware=1", "head_aware is 1; expected true or false."),
    ("norm_preserving=maybe", "norm_preserving is 'maybe'; expected true or false."),
    ("reg=0.1", "method opt-deus has no option 'reg'."),
]
DEVICES = ["cuda:99", "gpu", "meta", "hpu", "privateuseone"]
NEEDED = [
    ([], "ot", "solver sinkhorn needs POT, which is not installed. Run: pip install 'midus-hf.ot.'."),
    (["solver=hungarian"], "scipy", "an exact assignment needs scipy, which is not installed. Run: pip install 'midus-hf.ot.'."),
    (["head_aware=true"], "scipy", "an exact assignment needs scipy, which is not installed. Run: pip install 'midus-hf.ot.'."),
    (["head_aware=true"], "ot", "solver sinkhorn needs POT, which is not installed. Run: pip install 'midus-hf.ot.'."),
]  # fmt: skip


def request(*settings: str) -> list[str]:
    return ["--method", "opt-deus", *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture
def without(monkeypatch):
    """A machine that lacks a package."""
    found = importlib.util.find_spec

    def lack(package: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
        )

    return lack


@pytest.mark.parametrize(("setting", "message"), NUMBERS + CHOICES)
def test_an_option_out_of_range_is_refused(setting, message, base, tmp_path, command, refused):
    refused(command("--base", base, *request(setting), "--dry-run"), message, [])
    refused(command("--base", base, *request(setting), "--output", tmp_path / "out"), message, [])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("0", "new layer 0 has no base layer before it; expected one on each side, since both are fused."),
        ("4", "new layer 4 has no base layer after it; expected one on each side, since both are fused."),
        ("llama-pro", "new layer 5 has no base layer after it; expected one on each side"),
    ],
)
def test_a_new_layer_at_an_end_is_refused(placement, message, base, tmp_path, command, refused):
    outcome = command("--base", base, *request(), "--placement", placement, "--output", tmp_path / "out")
    refused(outcome, message, [])


@pytest.mark.parametrize("method", ["opt-deus", "lesa"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_cannot_be_computed_on_is_refused(method, device, base, tmp_path, command, refused):
    message = f"device is '{device}', which cannot be used here .*expected one of: cpu(, cuda)?\\."
    usual = ("--base", base, "--method", method, "--set", f"device={device}", "--output", tmp_path / "out")
    refused(command(*usual), message, [])


@pytest.mark.parametrize("method", ["opt-deus", "lesa"])
@pytest.mark.parametrize(("device", "value"), [("0", "0"), ("", "None"), ("[cpu]", r"\['cpu'\]")])
def test_a_device_that_is_no_name_is_refused(method, device, value, base, tmp_path, command, refused):
    usual = ("--base", base, "--method", method, "--set", f"device={device}", "--output", tmp_path / "out")
    refused(command(*usual), f"device is {value}; expected a string.", [])


def test_a_dry_run_asks_for_no_device_because_it_may_plan_for_another_machine(base, command):
    assert command("--base", base, *request("device=cuda"), "--dry-run").status == 0


def test_the_processor_is_there():
    check_device("cpu")


def test_where_there_is_a_gpu_it_is_offered(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RequestError, match="expected one of: cpu, cuda"):
        check_device("nonsense")


@pytest.mark.parametrize(("settings", "package", "message"), NEEDED)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    settings, package, message, base, tmp_path, command, refused, without
):
    without(package)
    refused(command("--base", base, *request(*settings), "--output", tmp_path / "out"), message, [])
    dry = command("--base", base, *request(*settings), "--dry-run")
    assert dry.status == 0 and dry.err == ""


@pytest.mark.parametrize(("settings", "package"), [(["solver=hungarian"], "ot"), ([], "scipy")])
def test_a_package_that_is_not_used_is_not_asked_for(settings, package, base, tmp_path, command, without):
    without(package)
    assert command("--base", base, *request(*settings), "--output", tmp_path / "out", "--no-verify").status == 0


def test_layers_that_attend_in_different_ways_are_warned_of_before_the_work_begins(
    shared_base, tmp_path, command, refused
):
    message = (
        "new layers 2, 4 fuse sliding and full attention, whose rotary embeddings and windows may differ. Pass "
        "neighbours=same_type to avoid it."
    )
    usual = ("--base", shared_base("gemma2"), *request("solver=hungarian"), "--no-verify")
    told = command(*usual, "--output", tmp_path / "out")
    assert told.status == 0 and told.err.startswith(f"upscale: warning: {message}\n")
    strict = (*usual, "--set", "strict=true", "--output", tmp_path / "strict")
    refused(command(*strict), f"{message} It is an error since strict is set.", ["out"])
    same_type = command(*strict, "--set", "neighbours=same_type")
    assert same_type.status == 0 and "fuse sliding" not in same_type.err


def test_the_layer_of_the_same_type_further_back_is_the_one_that_is_fused(shared_base, tmp_path):
    report = upscale(
        base=shared_base("gemma2"),
        method="opt-deus",
        output=tmp_path / "out",
        placement="3",
        options={"neighbours": "same_type", "solver": "hungarian"},
        verify=False,
    )
    assert report.new_layer_indices == [3]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "new, between base 2 and base 3, made from 1 and 3" in card


def test_a_base_with_nothing_to_match_is_refused_before_anything_is_written(tmp_path, command, refused):
    base = save_base(tmp_path / "base", num_hidden_layers=1)
    outcome = command("--base", base, *request(), "--num-new-layers", 1, "--output", tmp_path / "out")
    refused(outcome, "num-new-layers is 1; placement top-heavy", ["base"])
    assert os.listdir(tmp_path) == ["base"]
