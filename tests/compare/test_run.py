"""What runs are asked for, their results as files, and all runs of a comparison: which, in which order, and what fails."""

import fcntl
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compare import fake_results
from compare.fake_results import result

from midus_hf.compare import run as run_module
from midus_hf.compare.plan import Comparison, Run, Variant
from midus_hf.compare.report import plan_records
from midus_hf.compare.run import Point, Result, build_request, collect, read_result, run_all, write_result
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import from_mapping
from midus_hf.memories.controls import Change
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__

CONTROLS = {"one-row": Change(options={"n": 1}), "shuffled-addresses": Change(shuffled=("values",))}
MEMORY = {"upscale": {"method": "midus-hml", "options": {"n": 4}}, "controls": CONTROLS}
ONE, TWO = {"learning_rate": 1e-3}, {"learning_rate": 1e-2}
TRAIN = {"corpus": "corpus", "max_steps": 4}


def variant(name: str, rates=(ONE,), upscale=None, train=TRAIN, **changes) -> Variant:
    return Variant(name, upscale, train, list(rates), **changes)


def comparison(folder: Path, **changes) -> Comparison:
    arguments = {"output_dir": str(folder / "out"), "seeds": [0], "train": TRAIN, **changes}
    return fake_results.comparison(["a"], **arguments)


def test_training_keys_have_what_the_comparison_sets(tmp_path):
    """Texts are measured at the end, or as the recipe says; the Trainer measures at the last step too."""
    one = comparison(tmp_path)
    assert Run(variant("a", train={**TRAIN, "learning_rate": 9.0}), ONE, 3).training_keys(one, "model", "run") == {
        **{"corpus": "corpus", "model_name_or_path": "model", "output_dir": "run", "seed": 3, "max_steps": 4},
        **{"dataloader_drop_last": True, "eval_on_start": True, "eval_steps": 4, "learning_rate": 1e-3},
        "eval_text": {"plants": "plants.txt", "stars": "stars.txt", "herbs": "herbs.txt"},
    }
    for given, every in (({"max_steps": 1e2}, 100), ({"eval_steps": None}, 4), ({"eval_steps": 3}, 3)):
        keys = Run(variant("a", train={**TRAIN, **given})).training_keys(one, "model", "run")
        assert from_mapping(TrainArguments, keys).eval_steps == every


def test_older_result_is_read_without_unknown_fields(tmp_path):
    report = result("a", [0.5], [0.25])
    write_result(tmp_path / "seed-0", report)
    older = json.loads((tmp_path / "seed-0.json").read_text()) | {"controls": {"one-row": {}}}
    older["curve"] = [{**point, "tokens": 512} for point in older["curve"]]
    (tmp_path / "seed-0.json").write_text(json.dumps(older))
    assert read_result(tmp_path / "seed-0") == report
    (tmp_path / "seed-1.json").mkdir()
    assert read_result(tmp_path / "seed-1") is None
    assert read_result(tmp_path / "absent" / "seed-0") is None


def test_published_results_belong_to_their_comparison(tmp_path):
    folder = Path(__file__).parents[2] / "experiments" / "results" / "smollm2-135m-instruct"
    results = [read_result(path.with_suffix("")) for path in sorted(folder.rglob("*.json"))]
    assert len(results) == 26
    assert all(math.isfinite(loss) for one in results for loss in one.losses.values())
    (full,) = [one for one in results if one.variant == "full" and one.rate == {"learning_rate": 1e-4}]
    own = ("model_name_or_path", "output_dir", "seed", "eval_steps", "eval_text", "eval_on_start", "learning_rate")
    train = {key: value for key, value in full.request["train"].items() if key not in own}
    kinds = {"domain": "addresses", "retention": "articles", "validation": "other_addresses"}
    texts = {kind: {name: full.request["texts"][name]} for kind, name in kinds.items()}
    request = build_request(
        Run(variant("full", train=train), full.rate), comparison(tmp_path, base=full.request["base"], **texts)
    )
    assert request.items() <= full.request.items()


def test_digest_of_a_folder_covers_files_and_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name, "inner").mkdir(parents=True)
        Path(name, "2.txt").write_text("two")
        Path(name, "inner", "1.txt").write_text("one")
    before = run_module.hash_text("a")
    assert before == run_module.hash_text("b")
    Path("a/2.txt").rename("a/3.txt")
    Path("b/2.txt").write_text("too")
    assert len({before, run_module.hash_text("a"), run_module.hash_text("b")}) == 3
    # A file counts by its bytes, and what is no path by its name.
    assert run_module.hash_text("a/inner/1.txt") == run_module.hash_text("b/inner/1.txt")
    assert run_module.hash_text("owner/corpus") != run_module.hash_text("owner/other")


def test_code_of_a_clone_has_its_commit(tmp_path, monkeypatch):
    (tmp_path / "midus_hf" / "compare").mkdir(parents=True)
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "midus_hf" / "compare" / "run.py"))
    assert run_module.code_version() == __version__
    (file := tmp_path / "midus_hf" / "__init__.py").write_text("")
    for words in ("init -q", "add .", "-c user.name=n -c user.email=e commit -q -m m"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    committed = run_module.code_version()
    assert len(committed) == len(f"{__version__} ()") + 40
    file.write_text("1")
    assert run_module.code_version() == f"{committed[:-1]}-dirty)"


class PretendedRuns:
    """A folder in which runs are pretended; `started` has the names of those that the last command began.

    `behaviour` tells of runs by name: a `loss` of the validation text, `exits` with a status and `prints` before.
    """

    def __init__(self, folder: Path):
        self.folder, self.behaviour, self.started = folder, dict[str, dict[str, Any]](), list[str]()

    def run(self, variants, **changes) -> dict[str, str]:
        self.started = []
        return run_all(comparison(self.folder, **changes), variants)

    def do(self, words, *, input, stdout, stderr, text, check) -> SimpleNamespace:
        """Stand in for `subprocess.run`."""
        assert words[1:] == ["-m", "midus_hf.compare.run"]
        assert stdout is stderr
        assert text
        values = json.loads(input)
        run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
        behaviour = self.behaviour.get(run.name, {})
        self.started.append(run.name)
        stdout.write(behaviour.get("prints", ""))
        stdout.flush()
        if not behaviour.get("exits"):
            one, loss = from_mapping(Comparison, values["comparison"]), behaviour.get("loss", 2.0)
            curve = [Point(step, {"plants": 2.0, "stars": 2.0, "herbs": loss if step else 3.0}) for step in (0, 4)]
            told = {"request": build_request(run, one), "origin": values["inputs"], "control": run.variant.control}
            write_result(run.folder(one), Result(run.variant.name, run.rate, run.seed, curve, **told))
        return SimpleNamespace(returncode=behaviour.get("exits", 0))


@pytest.fixture
def pretended(tmp_path, monkeypatch) -> PretendedRuns:
    monkeypatch.chdir(tmp_path)
    runs = PretendedRuns(tmp_path)
    monkeypatch.setattr(run_module, "subprocess", SimpleNamespace(run=runs.do))
    monkeypatch.setattr(run_module, "hash_base", lambda base: Path(base).read_text() if Path(base).exists() else base)
    return runs


def test_runs_start_one_after_another_in_the_order_of_the_plan(pretended, capsys):
    pretended.behaviour = {"a/0.01/seed-1": {"loss": 1.0}}
    assert pretended.run([variant("a", [ONE, TWO]), variant("b", **MEMORY)], seeds=[1, 0, 2]) == {}
    expected = ["base", "a/0.001/seed-1", "a/0.01/seed-1", "b/0.001/seed-1"]
    expected += ["a/0.01/seed-0", "b/0.001/seed-0", "a/0.01/seed-2", "b/0.001/seed-2"]
    expected += [f"b+one-row/0.001/seed-{seed}" for seed in (1, 0, 2)]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [f"{name}: done (0 s)" for name in expected]
    assert pretended.started == expected


# What a failed run prints, and the words of it that are told.
PRINTED = {"": "it printed nothing", "a line\nOutOfMemoryError: no memory\n": "OutOfMemoryError: no memory"}
PRINTED["hf_" + "x" * 34 + " was refused\n"] = "<hidden> was refused"


@pytest.mark.parametrize(("prints", "words"), PRINTED.items(), ids=["nothing", "lines", "secret"])
def test_failed_run_is_reported_and_repeated_by_the_same_command(pretended, prints, words):
    pretended.behaviour = {"a/0.001/seed-0": {"exits": 3, "prints": prints}}
    log = pretended.folder / "out/runs/a/0.001/seed-0.log"
    variants = [variant("a"), variant("b")]
    assert pretended.run(variants) == {"a/0.001/seed-0": f"{words} (status 3; see {log})"}
    assert pretended.started == ["base", "a/0.001/seed-0", "b/0.001/seed-0"]
    assert log.read_text() == prints
    pretended.behaviour = {}
    assert pretended.run(variants) == {}
    assert pretended.started == ["a/0.001/seed-0"]
    assert log.read_text() == ""


def test_only_added_runs_are_done(pretended):
    a = variant("a", **MEMORY)
    pretended.run([a])
    assert pretended.started == ["base", "a/0.001/seed-0", "a+one-row/0.001/seed-0"]
    results = {path: path.read_bytes() for path in (pretended.folder / "out").rglob("*.json")}
    pretended.run([a])
    assert pretended.started == []
    pretended.run([a, variant("b")], seeds=[0, 1])
    assert pretended.started == ["b/0.001/seed-0", "a/0.001/seed-1", "b/0.001/seed-1", "a+one-row/0.001/seed-1"]
    # A rate that turns out to be better gets the other seeds, and null controls of its own.
    pretended.behaviour = {"a/0.01/seed-0": {"loss": 1.0}}
    faster, added = [variant("a", [ONE, TWO], **MEMORY)], ["a/0.01", "a+one-row/0.01"]
    pretended.run(faster, seeds=[0, 1])
    assert pretended.started == [f"{name}/seed-{seed}" for name in added for seed in (0, 1)]
    _, found, missing = collect(comparison(pretended.folder, seeds=[0, 1]), faster)
    expected = [("a", ONE, 0), ("a", TWO, 0), ("a", TWO, 1), ("a+one-row", TWO, 0), ("a+one-row", TWO, 1)]
    assert [(one.variant, one.rate, one.seed) for one in found] == expected
    assert missing == 0
    (record,) = plan_records(comparison(pretended.folder, seeds=[0, 1]), faster)
    assert (record["runs"], record["null_controls"], record["done"]) == (5, 2, 5)
    assert all(path.read_bytes() == content for path, content in results.items())


# The run that fails, the rates and the rest of a variant, its runs of two seeds, and how many are missing.
FIRST, CONTROL = "a/0.001/seed-0", "a+one-row/0.001/seed"
NOT_DONE = {
    "the base": ("base", [ONE], {}, [], 2),
    "a rate": ("a/0.01/seed-0", [ONE, TWO], {}, [FIRST, "a/0.01/seed-0", "a/0.001/seed-1"], 1),
    "the only rate": (FIRST, [ONE], MEMORY, [FIRST], 4),
    "a null control": (f"{CONTROL}-1", [ONE], MEMORY, [FIRST, "a/0.001/seed-1", f"{CONTROL}-0", f"{CONTROL}-1"], 1),
}


@pytest.mark.parametrize(("failing", "rates", "memory", "runs", "missing"), NOT_DONE.values(), ids=NOT_DONE)
def test_other_runs_follow_one_that_failed_unless_the_base(pretended, failing, rates, memory, runs, missing):
    pretended.behaviour, variants = {failing: {"exits": 1}}, [variant("a", rates, **memory)]
    assert list(pretended.run(variants, seeds=[0, 1])) == [failing]
    assert pretended.started == ["base", *runs]
    base, results, counted = collect(comparison(pretended.folder, seeds=[0, 1]), variants)
    assert counted == missing
    assert len([base, *results]) == len(runs) + (base is None)


# What changes: keys of the comparison, a result or the content of a file; and the run that is refused.
CHANGED = {
    "steps": ({"train": {**TRAIN, "max_steps": 8}}, FIRST),
    "another base": ({"base": "corpus"}, "base"),
    "other texts": ({"retention": {}}, "base"),
    "a control": (f"out/runs/{CONTROL}-0.json", f"{CONTROL}-0"),
    **{f"content of {name}": (name, "base") for name in ("base", "corpus", "plants.txt", "herbs.txt")},
}


@pytest.mark.parametrize(("change", "run"), CHANGED.values(), ids=CHANGED)
def test_result_of_another_request_is_refused(pretended, change, run):
    for name in ("base", "corpus", "plants.txt", "herbs.txt"):
        (pretended.folder / name).write_text("before")
    pretended.run([variant("a", **MEMORY)])
    changes = change if isinstance(change, dict) else {}
    if not changes:
        path = pretended.folder / change
        path.write_text(path.read_text().replace('"n": 1', '"n": 2').replace("before", "after"))
    message = (
        rf"out/runs/{re.escape(run)}.json was made with another request.*expected the same, or another output_dir"
    )
    with pytest.raises(RequestError, match=message):
        pretended.run([variant("new"), variant("a", **MEMORY, train=changes.get("train", TRAIN))], **changes)
    assert pretended.started == []


def test_same_command_takes_only_runs_that_no_other_has_taken(pretended, monkeypatch, capsys):
    """Another process does the first run of `a`, and ends without a result once all others are done."""
    log = pretended.folder / f"out/runs/{FIRST}.log"
    log.parent.mkdir(parents=True)
    other, waits = log.open("w"), []
    fcntl.flock(other, fcntl.LOCK_EX)

    def sleep(seconds):
        waits.append([*pretended.started])
        if len(waits) == 2:
            other.close()

    monkeypatch.setattr(run_module.time, "sleep", sleep)
    assert pretended.run([variant("a"), variant("b")], seeds=[0, 1]) == {}
    # The second seeds wait, since the rate of `a` is not chosen yet.
    assert waits == [["base", "b/0.001/seed-0"]] * 2
    assert pretended.started == [*waits[0], FIRST, "a/0.001/seed-1", "b/0.001/seed-1"]
    assert capsys.readouterr().err.count(f"waiting for runs of other processes, such as {FIRST}\n") == 1


def test_file_system_without_locks_is_told(pretended, monkeypatch, capsys):
    monkeypatch.setattr(run_module.fcntl, "flock", lambda *_: os.fstat(-1))
    assert pretended.run([]) == {}
    assert pretended.started == ["base"]
    assert (
        "base.log is not locked: its file system has no locks. Start no second process.\n" in capsys.readouterr().err
    )


def test_process_of_a_run_writes_to_the_log_and_keeps_its_lock(tmp_path, monkeypatch, capfd):
    """A killed comparison leaves the process of its run, for which the same command waits."""
    program, ended = tmp_path / "program", tmp_path / "ended"
    program.write_text(f"#!/bin/sh\necho printed\nwhile ! test -e {ended}; do sleep 0.05; done\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(run_module, "hash_base", lambda base: f"digest of {base}")
    one, log = comparison(tmp_path), tmp_path / "out/runs/base.log"
    if not (killed := os.fork()):
        run_all(one, [])
        os._exit(0)
    while not log.is_file() or log.read_text() != "printed\n":
        time.sleep(0.01)
    os.kill(killed, 9)
    os.waitpid(killed, 0)
    monkeypatch.setattr(run_module.time, "sleep", lambda seconds: (ended.touch(), os.sched_yield()))
    assert run_all(one, []) == {"base": f"printed (status 3; see {log})"}
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "waiting for runs of other processes, such as base" in printed.err
