"""`midus compare`: what it would run, what it reports, how it ends, and what it refuses."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from compare.small_comparison import HEADWISE, SmallComparison, keys, write_room

HML, PRO = {"upscale": HEADWISE, "rates": [1e-2, 1e-3]}, {"upscale": {"method": "llama-pro", "num_new_layers": 1}}
VARIANTS = {"hml": HML, "pro": PRO, "full": {}}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return write_room(tmp_path_factory.mktemp("room"))


@pytest.fixture
def config(room, tmp_path):
    comparison_keys = keys(room, tmp_path / "out", VARIANTS, seeds=[0, 1], controls=False)
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(comparison_keys, sort_keys=False))
    return tmp_path / "compare.yaml"


@pytest.fixture
def run(as_command):
    return as_command("midus compare")


@pytest.fixture(scope="module")
def results(room, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("results") / "out"
    comparing = SmallComparison(room, output, VARIANTS, seeds=[0, 1], controls=False)
    comparing.measure_base()
    comparing.measure(comparing.runs()[0])
    return output


@pytest.fixture
def measured(results, tmp_path) -> Path:
    return Path(shutil.copytree(results, tmp_path / "out"))


@pytest.fixture
def runs(monkeypatch):
    """End runs at once in place of running them, with words for those that fail."""
    pretended = SimpleNamespace(failures={}, started=0)

    def run_all(comparison, variants) -> dict[str, str]:
        pretended.started += 1
        return dict(pretended.failures)

    monkeypatch.setattr("midus_hf.compare.run.run_all", run_all)
    return pretended


def test_dry_run_counts_all_runs_and_writes_nothing(run, config, tmp_path):
    report = json.loads(run(config, "--dry-run", "--json").out)
    hml, pro, full = report["variants"]
    assert report["seeds"] == [0, 1]
    assert hml | dict.fromkeys(("new_parameters", "trained_parameters"), 0) == {
        "variant": "hml", "method": "midus-hml", "new_parameters": 0, "trained_parameters": 0,
        "rates": ["0.01,value=0.1", "0.001,value=0.01"], "runs": 3, "null_controls": 0, "done": 0,
    }  # fmt: skip
    assert pro["trained_parameters"] > 0
    assert (full["method"], full["trained_parameters"]) == ("the base", None)
    table = run(config, "--dry-run").out
    assert "0 of 3" in table
    settings = ["seeds=[7,8]", "variants.full.rates=[1,2,3]", "variants.full.train.adapters.r=2", "controls=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    hml, *others = json.loads(run(config, *words, "--dry-run", "--json").out)["variants"]
    assert others[1]["method"] == "LoRA"
    assert [one["runs"] for one in others] == [2, 4]
    # Three null controls are trained with both seeds; shuffled addresses take no training.
    assert (hml["runs"], hml["null_controls"]) == (9, 6)
    assert not (tmp_path / "out").exists()


def test_dry_run_and_report_show_what_is_done(run, config, measured, tmp_path, runs, monkeypatch):
    report = json.loads(run(config, "--dry-run", "--json").out)
    assert [variant["done"] for variant in report["variants"]] == [1, 0, 0]
    report = json.loads(run(config, "--report", "--json").out)
    assert [variant["name"] for variant in report["variants"]] == ["hml"]
    assert (report["missing"], report["failures"]) == (6, {})
    assert (tmp_path / "out" / "report.md").is_file()
    done = run(config, "--report").succeeded()
    assert "Runs that are not done: 6." in done.out
    assert f"report: {report['report']}" in done.out
    assert done.out.endswith(" ".join(report["advice"]).replace(". ", ".\n") + "\n")
    assert runs.started == 0
    monkeypatch.setattr("midus_hf.compare.run.hash_text", lambda path: f"another of {path}")
    done = run(config, "--dry-run")
    assert done.status == 2
    assert "base.json was made with another request, or from other texts" in done.err


@pytest.mark.parametrize(("words", "message"), [
    (["--set", "seed=1"], "config has no option 'seed'. Expected one of: base, "),
    (["--set", "train.corpus=absent.txt"], "train.corpus is 'absent.txt', which does not exist"),
])  # fmt: skip
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_wrong_request_is_refused_in_one_line(run, config, tmp_path, how, words, message):
    done = run(config, *how, *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()
    assert done.err.startswith("midus compare: ")
    assert message in done.err


def test_comparison_without_a_result_ends_with_the_reason(run, config, runs, tmp_path):
    done, line = run(config, "--report"), f"midus compare: {tmp_path / 'out'} has no result yet: "
    assert done == (1, "", f"{line}the base is measured first\n")
    assert not (tmp_path / "out").exists()
    runs.failures = {"base": "midus eval ended with status 2"}
    done = run(config)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1] == f"{line}midus eval ended with status 2"


@pytest.mark.parametrize(("failures", "words", "json_"), [
    ({}, "", []),
    ({"full/recipe/seed-0": "no memory"}, "one run failed, full/recipe/seed-0: no memory.", []),
    ({"full": "no memory", "b": "c"}, "2 runs failed, the first full: no memory.", ["--json"]),
])  # fmt: skip
def test_status_is_1_after_failed_runs(run, config, measured, runs, failures, words, json_):
    runs.failures = failures
    done = run(config, *json_)
    assert (done.status, runs.started) == (1 if failures else 0, 1)
    if failures:
        assert done.err.splitlines()[-1] == f"midus compare: {words} The same command repeats what failed."
    if json_:
        assert json.loads(done.out)["failures"] == failures
    elif failures:
        assert "Failed: full/recipe/seed-0: no memory." in done.out
