"""What bad requests to OpT-DeUS get, and machines without what it needs."""

import importlib.util

import pytest

DEVICES = ["cuda:99", "gpu", "meta", "hpu", "privateuseone"]
NEEDED = [
    ([], "ot", "solver sinkhorn needs POT, which is not installed; in the clone of midus_hf, run: "),
    (["solver=hungarian"], "scipy", "solver hungarian needs scipy, which is not installed; in the clone of midus_hf, run: "),
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
