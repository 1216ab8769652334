"""`midus compare`: what it would run, what it reports, how it ends, and what it refuses."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from compare.small_comparison import HEADWISE, SmallComparison, keys, write_room

VARIANTS = {
    "hml": {"upscale": HEADWISE, "rates": [1e-2, 1e-3]},
    "pro": {"upscale": {"method": "llama-pro", "num_new_layers": 1}},
    "full": {},
}


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
    """Measure the base and the first run of `hml`; return the folder that they leave."""
    output = tmp_path_factory.mktemp("results") / "out"
    comparing = SmallComparison(room, output, VARIANTS, seeds=[0, 1], controls=False)
    comparing.measure_base()
    comparing.measure(comparing.runs()[0])
    return output


@pytest.fixture
def measured(results, tmp_path) -> Path:
    """Return a copy of the comparison's folder in which the base and the first run of `hml` are measured."""
    return Path(shutil.copytree(results, tmp_path / "out"))


@pytest.fixture
def runs(monkeypatch):
    """End runs at once in place of running them, with words for those that fail."""
    pretended = SimpleNamespace(failures={}, started=[])

    def run_all(comparison, variants, jobs, devices) -> dict[str, str]:
        pretended.started.append((jobs, devices))
        return dict(pretended.failures)

    monkeypatch.setattr("midus_hf.compare.running.run_all", run_all)
    return pretended


def test_a_dry_run_says_what_would_run_and_writes_nothing(run, config, tmp_path):
    report = json.loads(run(config, "--dry-run", "--json").out)
    hml, pro, full = report["variants"]
    assert report["seeds"] == [0, 1]
    assert {**hml, "new_parameters": 0, "trained_parameters": 0} == {
        "variant": "hml", "method": "midus-hml", "new_parameters": 0, "trained_parameters": 0,
        "rates": ["0.01,value=0.1", "0.001,value=0.01"], "runs": 3, "tokens": 3 * 4 * 64, "done": 0,
    }  # fmt: skip
    assert pro["trained_parameters"] > 0 and (full["method"], full["trained_parameters"]) == ("the base", None)
    table = run(config, "--dry-run").out
    assert "null controls" not in table and "0 of 3" in table and "768" in table
    settings = ["seeds=[7]", "variants.full.rates=[1,2,3]", "variants.full.train.adapters.r=2", "controls=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    report = json.loads(run(config, *words, "--dry-run", "--json").out)
    assert report["variants"][2]["method"] == "LoRA"
    assert report["seeds"] == [7] and [variant["runs"] for variant in report["variants"]] == [2, 1, 3]
    table = run(config, *words, "--dry-run").out
    assert "then null controls, which are not counted here" in " ".join(table.split())
    assert not (tmp_path / "out").exists()


def test_a_dry_run_and_a_report_say_what_is_done(run, config, measured, tmp_path, runs, monkeypatch):
    report = json.loads(run(config, "--dry-run", "--json").out)
    assert [variant["done"] for variant in report["variants"]] == [1, 0, 0]
    report = json.loads(run(config, "--report", "--json").out)
    assert [variant["name"] for variant in report["variants"]] == ["hml"]
    assert (report["missing"], report["failures"]) == (6, {})
    assert (tmp_path / "out" / "report.html").is_file()
    done = run(config, "--report")
    assert done.status == 0 and "Runs that are not done: 6." in done.out
    assert done.out.splitlines()[-1] == f"report: {report['page']}"
    assert runs.started == []
    monkeypatch.setattr("midus_hf.compare.origins.text_digest", lambda path: f"another of {path}")
    done = run(config, "--dry-run")
    assert done.status == 2 and "base was done with another content of the corpus or of a text;" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "jobs is 0; expected at least 1."),
        (["--devices", "x"], "devices is 'x'; expected numbers of GPUs, such as 0,1."),
        (["--devices", "0,"], "devices is '0,'; expected numbers of GPUs, such as 0,1."),
        (["--devices", ""], "--devices is ''; expected a value. Fill it in"),
        (["--devices", "0,1", "--jobs", "3"], "jobs is 3, and devices names 2; expected one run per device. Leave jobs out."),
        (["--set", "seed=1"], "config has no option 'seed'. Expected one of: base, "),
        (["--set", "train.sequence_length=65"], "sequence_length is 65, but the model has positions for 64 tokens."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_wrong_request_is_told_in_one_line(run, config, tmp_path, how, words, message):
    done = run(config, *how, *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1) and not (tmp_path / "out").exists()
    assert done.err.startswith("midus compare: ") and message in done.err


def test_without_a_result_that_is_the_line(run, config, runs, tmp_path):
    done = run(config, "--report")
    line = f"midus compare: {tmp_path / 'out'} has no result yet: "
    assert done == (1, "", f"{line}the base is measured first\n") and not (tmp_path / "out").exists()
    runs.failures = {"base": "midus eval ended with status 2"}
    done = run(config)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1] == f"{line}midus eval ended with status 2"


@pytest.mark.parametrize(
    ("failures", "words", "json_"),
    [
        ({"full/recipe/seed-0": "no memory"}, "one run failed, full/recipe/seed-0: no memory.", []),
        ({"full": "no memory", "b": "c"}, "2 runs failed, the first full: no memory.", ["--json"]),
    ],
    ids=["one", "two-json"],
)
def test_where_runs_failed_the_report_is_written_and_the_status_is_1(
    run, config, measured, runs, failures, words, json_
):
    runs.failures = failures
    done = run(config, *json_)
    assert done.status == 1
    assert done.err.splitlines()[-1] == f"midus compare: {words} The same command repeats what failed."
    if json_:
        assert json.loads(done.out)["failures"] == failures
    else:
        assert f"Runs that are not done: 6, of which {len(failures)} failed." in done.out


@pytest.mark.parametrize(
    ("words", "places"),
    [([], (1, [])), (["--jobs", "3"], (3, [])), (["--devices", "0, 2"], (1, ["0", "2"]))],
    ids=["neither", "jobs", "devices"],
)
def test_jobs_and_devices_are_places_for_runs_and_where_all_is_done_the_status_is_0(
    run, config, measured, runs, words, places
):
    done = run(config, *words)
    assert done.status == 0 and "What" not in done.err
    assert runs.started == [places]
