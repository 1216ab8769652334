"""All runs of a comparison: in which order, what is skipped, what another process does, and what fails."""

import dataclasses
import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midus_hf.compare import run as run_module
from midus_hf.compare.plan import Comparison, Run, Variant, VariantOptions
from midus_hf.compare.run import Point, Result, collect, request_of, run_all, write_result
from midus_hf.config.errors import RequestError
from midus_hf.memories.controls import Change

CONTROLS = {"one-row": Change(options={"n": 1}), "shuffled-addresses": Change(shuffled=("values",))}
MEMORY = {"upscale": {"method": "midus-hml", "options": {"n": 4}}, "controls": CONTROLS}
ONE, TWO = {"learning_rate": 1e-3}, {"learning_rate": 1e-2}


def comparison(folder: Path, **changes) -> Comparison:
    arguments = {"base": "base", "output_dir": str(folder / "out"), "variants": {"a": VariantOptions()}, "seeds": [0]}
    arguments |= {"train": {"corpus": "corpus", "max_steps": 4}, "domain": {"plants": "plants.txt"}}
    arguments |= {"validation": {"herbs": "herbs.txt"}}
    return Comparison(**{**arguments, **changes})


def variant(name: str, rates=(ONE,), upscale=None, **changes) -> Variant:
    return Variant(name, upscale, {"corpus": "corpus", "max_steps": 4}, list(rates), **changes)


class PretendedRuns:
    """A folder in which runs are pretended.

    `behaviour` tells of runs by name: a `loss` of the validation text, `exits` with a status and `prints` before. `started` has
    the names of runs that have begun.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.behaviour: dict[str, dict[str, Any]] = {}
        self.started: list[str] = []

    def run(self, variants, **changes) -> dict[str, str]:
        return run_all(comparison(self.folder, **changes), variants)

    def collect(self, variants, **changes) -> tuple[list[tuple[str, dict[str, float], int]], int]:
        """Name, rate and seed of the results in addition to the base's, and the number of those that are missing."""
        base, results, missing = collect(comparison(self.folder, **changes), variants)
        assert base is not None
        return [(one.variant, one.rate, one.seed) for one in results], missing

    def names(self) -> list[str]:
        """Return the names of the runs that have begun, in order, and forget them."""
        names = list(self.started)
        self.started.clear()
        return names

    def do(self, words, *, input, stdout, stderr, text, check) -> SimpleNamespace:
        """Stand in for `subprocess.run`."""
        assert words[1:] == ["-m", "midus_hf.compare.run"] and stdout is stderr and text
        values = json.loads(input)
        run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
        behaviour = self.behaviour.get(run.name, {})
        self.started.append(run.name)
        stdout.write(behaviour.get("prints", ""))
        stdout.flush()
        if not behaviour.get("exits", 0):
            one, loss = comparison(self.folder), behaviour.get("loss", 2.0)
            curve = [Point(step, {"plants": 2.0, "herbs": loss if step else 3.0}) for step in (0, 4)]
            names = {"control": run.variant.control, "control_of": run.variant.control_of}
            told = {"request": request_of(run, one), "origin": values["inputs"], **names}
            write_result(run.folder(one), Result(run.variant.name, run.rate, run.seed, curve, **told))
        return SimpleNamespace(returncode=behaviour.get("exits", 0))


@pytest.fixture
def pretended(tmp_path, monkeypatch) -> PretendedRuns:
    monkeypatch.chdir(tmp_path)
    path = PretendedRuns(tmp_path)
    monkeypatch.setattr(run_module, "subprocess", SimpleNamespace(run=path.do))
    monkeypatch.setattr("midus_hf.compare.run.hash_base", lambda base: f"digest of {base}")
    return path


def test_runs_start_one_after_another_in_the_order_of_the_plan(pretended, capsys):
    pretended.behaviour = {"a/0.01/seed-1": {"loss": 1.0}}
    assert pretended.run([variant("a", [ONE, TWO]), variant("b", **MEMORY)], seeds=[1, 0, 2]) == {}
    expected = ["base", "a/0.001/seed-1", "a/0.01/seed-1", "b/0.001/seed-1"]
    for seed in (0, 2):
        expected += [f"a/0.01/seed-{seed}", f"b/0.001/seed-{seed}"]
    expected += [f"b+one-row/0.001/seed-{seed}" for seed in (1, 0, 2)]
    assert pretended.names() == expected
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [f"{name}: done (0 s)" for name in expected]


@pytest.mark.parametrize(
    ("prints", "words"),
    [
        ("", "it printed nothing"),
        ("a line\nOutOfMemoryError: no memory\n", "OutOfMemoryError: no memory"),
        ("hf_" + "x" * 34 + " was refused\n", "<hidden> was refused"),
    ],
    ids=["nothing", "lines", "secret"],
)
def test_failed_run_is_reported_and_repeated_by_the_same_command(pretended, prints, words):
    pretended.behaviour = {"a/0.001/seed-0": {"exits": 3, "prints": prints}}
    log = pretended.folder / "out/runs/a/0.001/seed-0.log"
    variants = [variant("a"), variant("b")]
    assert pretended.run(variants) == {"a/0.001/seed-0": f"{words} (status 3; see {log})"}
    assert pretended.names() == ["base", "a/0.001/seed-0", "b/0.001/seed-0"] and log.read_text() == prints
    pretended.behaviour = {}
    assert pretended.run(variants) == {} and pretended.names() == ["a/0.001/seed-0"] and log.read_text() == ""


def test_nothing_follows_a_base_that_failed(pretended):
    pretended.behaviour = {"base": {"exits": 1}}
    assert list(pretended.run([variant("a")])) == ["base"] and pretended.names() == ["base"]


def test_only_added_runs_are_done(pretended):
    a = variant("a", **MEMORY)
    pretended.run([a])
    assert pretended.names() == ["base", "a/0.001/seed-0", "a+one-row/0.001/seed-0"]
    results = {path: path.read_bytes() for path in (pretended.folder / "out").rglob("*.json")}
    pretended.run([a])
    assert pretended.names() == []
    pretended.run([a, variant("b")], seeds=[0, 1])
    assert pretended.names() == ["b/0.001/seed-0", "a/0.001/seed-1", "b/0.001/seed-1", "a+one-row/0.001/seed-1"]
    # A rate that turns out to be better gets the other seeds, and null controls of its own.
    pretended.behaviour = {"a/0.01/seed-0": {"loss": 1.0}}
    faster = [variant("a", [ONE, TWO], **MEMORY)]
    pretended.run(faster, seeds=[0, 1])
    assert pretended.names() == [
        "a/0.01/seed-0", "a/0.01/seed-1", "a+one-row/0.01/seed-0", "a+one-row/0.01/seed-1"
    ]  # fmt: skip
    counted = [("a", ONE, 0), ("a", TWO, 0), ("a", TWO, 1), ("a+one-row", TWO, 0), ("a+one-row", TWO, 1)]
    assert pretended.collect(faster, seeds=[0, 1]) == (counted, 0)
    assert all(path.read_bytes() == content for path, content in results.items())


# Runs that fail, the rates and the rest of a variant, its runs of two seeds after its first, and how many are missing.
NOT_DONE = {
    "a rate": (["a/0.01/seed-0"], [ONE, TWO], {}, ["a/0.01/seed-0", "a/0.001/seed-1"], 1),
    "the only rate": (["a/0.001/seed-0"], [ONE], MEMORY, [], 4),
    "a null control": (
        ["a+one-row/0.001/seed-1"], [ONE], MEMORY, ["a/0.001/seed-1", "a+one-row/0.001/seed-0", "a+one-row/0.001/seed-1"], 1
    ),
}  # fmt: skip


@pytest.mark.parametrize(("failing", "rates", "memory", "others", "missing"), NOT_DONE.values(), ids=NOT_DONE)
def test_other_runs_follow_a_failed_one(pretended, failing, rates, memory, others, missing):
    pretended.behaviour, variants = {name: {"exits": 1} for name in failing}, [variant("a", rates, **memory)]
    assert list(pretended.run(variants, seeds=[0, 1])) == failing
    assert pretended.names() == ["base", "a/0.001/seed-0", *others]
    results, counted = pretended.collect(variants, seeds=[0, 1])
    assert counted == missing and len(results) == 1 + len(others) - len(failing)


def change_control(folder: Path) -> None:
    path = folder / "out/runs/a+one-row/0.001/seed-0.json"
    path.write_text(path.read_text().replace('"n": 1', '"n": 2'))


# What changes a file, keys of the comparison, and the run that is refused.
CHANGED = {
    "base": ("", {"base": "other"}, "base"),
    "steps": ("", {"train": {"corpus": "corpus", "max_steps": 8}}, "base"),
    "a control": (change_control, {}, "a+one-row/0.001/seed-0"),
    **{f"content of {name}": (name, {}, "base") for name in ("the base", "corpus", "plants.txt", "herbs.txt")},
}


@pytest.mark.parametrize(("change", "changes", "run"), CHANGED.values(), ids=CHANGED)
def test_result_of_another_request_is_refused(pretended, change, changes, run, monkeypatch):
    for name in ("corpus", "plants.txt", "herbs.txt"):
        (pretended.folder / name).write_text("before")
    pretended.run([variant("a", **MEMORY)])
    pretended.names()
    if callable(change):
        change(pretended.folder)
    elif change == "the base":
        monkeypatch.setattr("midus_hf.compare.run.hash_base", lambda base: "another")
    elif change:
        (pretended.folder / change).write_text("after")
    changed = variant("a", **MEMORY)
    if "train" in changes:
        changed, run = dataclasses.replace(changed, train=changes["train"]), "a/0.001/seed-0"
    message = (
        rf"out/runs/{re.escape(run)}.json was made with another request.*; expected the same, or another output_dir"
    )
    with pytest.raises(RequestError, match=message):
        pretended.run([variant("new"), changed], **changes)
    assert pretended.names() == []


def test_same_command_takes_only_runs_that_no_other_has_taken(pretended, monkeypatch, capsys):
    """Another process does the first run of `a`, and ends without a result once all others are done."""
    pretended.run([])
    log = pretended.folder / "out/runs/a/0.001/seed-0.log"
    log.parent.mkdir(parents=True)
    other = log.open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    waits = []

    def sleep(seconds):
        waits.append(pretended.names())
        if len(waits) == 2:
            other.close()

    monkeypatch.setattr(run_module.time, "sleep", sleep)
    assert pretended.run([variant("a"), variant("b")], seeds=[0, 1]) == {}
    # The second seeds wait, since the rate of `a` is not chosen yet.
    assert waits == [["base", "b/0.001/seed-0"], []]
    assert pretended.names() == ["a/0.001/seed-0", "a/0.001/seed-1", "b/0.001/seed-1"]
    assert capsys.readouterr().err.count("waiting for runs of other processes, such as a/0.001/seed-0\n") == 1


def test_process_of_a_run_writes_to_the_log_and_keeps_its_lock(tmp_path, monkeypatch, capfd):
    """A killed comparison leaves the process of its run, for which the same command waits."""
    program, ended = tmp_path / "program", tmp_path / "ended"
    program.write_text(f"#!/bin/sh\necho printed\nwhile ! test -e {ended}; do sleep 0.05; done\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("midus_hf.compare.run.hash_base", lambda base: f"digest of {base}")
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
    assert printed.out == "" and "waiting for runs of other processes, such as base" in printed.err
