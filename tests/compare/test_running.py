"""All runs of a comparison: in which order, how many beside one another, what is skipped, and what fails."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midus_hf.compare import running
from midus_hf.compare.options import Comparison, VariantOptions
from midus_hf.compare.running import collect, run_all
from midus_hf.compare.runs import Point, Result, Run, write_result
from midus_hf.compare.variants import Variant

UPSCALE = {"method": "midus-hml", "options": {"n": 4}}
ONE, TWO = {"learning_rate": 1e-3}, {"learning_rate": 1e-2}
CONTROLS = {"one-row": {"options": {"n": 1}, "trainable": []}, "shuffled-addresses": {"options": {}, "trainable": []}}


def comparison(folder: Path, **changes) -> Comparison:
    arguments = {"base": "base", "output_dir": str(folder / "out"), "variants": {"a": VariantOptions()}, "seeds": [0]}
    arguments |= {"train": {"corpus": "corpus", "max_steps": 4}, "domain": {"plants": "plants.txt"}}
    arguments |= {"validation": {"herbs": "herbs.txt"}}
    return Comparison(**{**arguments, **changes})


def variant(name: str, rates=(ONE,), upscale=None, **changes) -> Variant:
    return Variant(name, upscale, {"corpus": "corpus", "max_steps": 4}, list(rates), **changes)


class PretendedProcess:
    """What `running` uses of `subprocess.Popen`: a run that ends with a result that a test has chosen. It is its own input."""

    returncode = None

    def __init__(self, runs: "PretendedRuns", env: dict[str, str], log: Path):
        self.runs, self.env, self.log, self.stdin = runs, env, log, self

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def write(self, words: str) -> None:
        values = json.loads(words)
        assert values["parent"] == os.getpid()
        self.run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
        self.inputs, self.behaviour = values["inputs"], self.runs.behaviour.get(self.run.name, {})
        self.looks = self.behaviour.get("looks", 0)
        self.log.write_text(self.behaviour.get("prints", ""))
        self.runs.notes.append({"name": self.run.name, "env": self.env, "beside": list(self.runs.alive)})
        self.runs.alive.append(self.run.name)

    def poll(self) -> int | None:
        self.looks -= 1
        if self.looks < 0 and self.returncode is None:
            self.runs.alive.remove(self.run.name)
            self.returncode = self.behaviour.get("exits", 0)
            if not self.returncode:
                self._write_result(self.behaviour.get("loss", 2.0))
        return self.returncode

    def _write_result(self, loss: float) -> None:
        run, one = self.run, comparison(self.runs.folder)
        controls = CONTROLS if run.variant.upscale is not None and run.variant.control is None else {}
        curve = [Point(step, {"plants": 2.0, "herbs": loss if step else 3.0}) for step in (0, 4)]
        names = {"control": run.variant.control, "control_of": run.variant.control_of, "controls": controls}
        told = {"request": run.request(one), "origin": self.inputs, **names}
        write_result(run.folder(one), Result(run.variant.name, run.rate, run.seed, curve, **told))


class PretendedRuns:
    """A folder in which runs are pretended.

    `behaviour` tells of runs by name: a `loss` of the validation text, `looks` before it ends, `exits` with a status and `prints`
    before. `notes` has of each run that began its name, the variables of its process, and the names of the runs beside it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.behaviour: dict[str, dict[str, Any]] = {}
        self.notes: list[dict[str, Any]] = []
        self.alive: list[str] = []

    def run(self, variants, jobs=1, devices=(), **changes) -> dict[str, str]:
        return run_all(comparison(self.folder, **changes), variants, jobs, devices)

    def collect(self, variants, **changes) -> tuple[list[tuple[str, dict[str, float], int]], int]:
        """Name, rate and seed of the results that count beside the base's, and the number of those that are missing."""
        base, results, missing = collect(comparison(self.folder, **changes), variants)
        assert base is not None
        return [(one.variant, one.rate, one.seed) for one in results], missing

    def names(self) -> list[str]:
        """Return the names of the runs that have begun, in order, and forget them."""
        names = [note["name"] for note in self.notes]
        self.notes.clear()
        return names

    def popen(self, words, *, env, stdin, stdout, stderr, text, start_new_session) -> PretendedProcess:
        assert words[1:] == ["-m", "midus_hf.compare.one_run"] and start_new_session and stdout is stderr
        return PretendedProcess(self, env, Path(stderr.name))


@pytest.fixture
def pretended(tmp_path, monkeypatch) -> PretendedRuns:
    monkeypatch.chdir(tmp_path)
    path = PretendedRuns(tmp_path)
    monkeypatch.setattr("midus_hf.compare.running._SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(running, "subprocess", SimpleNamespace(Popen=path.popen, PIPE=-1))
    monkeypatch.setattr("midus_hf.compare.origins.base_digest", lambda base: f"digest of {base}")
    return path


def test_all_rates_are_searched_with_the_first_seed_before_the_best_has_a_second(pretended, capsys):
    pretended.behaviour = {"a/0.01/seed-1": {"loss": 1.0}}
    assert pretended.run([variant("a", [ONE, TWO]), variant("b")], seeds=[1, 0, 2]) == {}
    expected = ["base", "a/0.001/seed-1", "a/0.01/seed-1", "b/0.001/seed-1"]
    for seed in (0, 2):
        expected += [f"a/0.01/seed-{seed}", f"b/0.001/seed-{seed}"]
    assert pretended.names() == expected
    printed = capsys.readouterr()
    assert printed.out == "" and [line for line in printed.err.splitlines() if line] == [
        f"{name}: done (0 s)" for name in expected
    ]


def test_several_runs_run_beside_one_another_the_base_alone_and_each_may_have_a_device(pretended, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    pretended.behaviour = {f"{name}/0.001/seed-0": {"looks": 3} for name in "abcd"}
    pretended.run([variant(name) for name in "abcd"], jobs=3)
    assert [len(note["beside"]) for note in pretended.notes] == [0, 0, 1, 2, 0]
    assert {note["env"]["CUDA_VISIBLE_DEVICES"] for note in pretended.notes} == {"0,1,2,3,4,5,6"}
    looks = zip("efgh", (3, 1, 3, 1), strict=True)
    pretended.behaviour = {f"{name}/0.001/seed-0": {"looks": number} for name, number in looks}
    pretended.notes.clear()
    pretended.run([variant(name) for name in "efgh"], devices=["3", "5"])
    device = {note["name"]: note["env"]["CUDA_VISIBLE_DEVICES"] for note in pretended.notes}
    assert set(device.values()) == {"3", "5"}
    for note in pretended.notes:
        assert all(device[note["name"]] != device[other] for other in note["beside"]) and len(note["beside"]) < 2


@pytest.mark.parametrize(("jobs", "threads"), [(1, 8), (3, 2), (20, 1)])
def test_runs_share_the_cores(pretended, monkeypatch, jobs, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pretended.run([variant("a")], jobs=jobs)
    assert {note["env"]["OMP_NUM_THREADS"] for note in pretended.notes} == {str(threads)}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    pretended.run([variant("b")], jobs=jobs)
    assert pretended.notes[-1]["env"]["OMP_NUM_THREADS"] == "7"


def test_what_fails_stops_nothing_else_unless_it_is_the_base_and_is_done_again(pretended):
    variants = [variant(name) for name in "abc"]
    pretended.behaviour = {"base": {"prints": "there is no such text", "exits": 1}}
    failures = pretended.run(variants)
    assert pretended.names() == ["base"] and failures["base"].startswith("there is no such text (status 1; see ")
    pretended.behaviour = {
        "a/0.001/seed-0": {"prints": "Traceback\nValueError: no.\n\n", "exits": 1},
        "b/0.001/seed-0": {"exits": -9},
    }
    logs = [pretended.folder / f"out/runs/{name}/0.001/seed-0.log" for name in "ab"]
    assert pretended.run(variants) == {
        "a/0.001/seed-0": f"ValueError: no. (status 1; see {logs[0]})",
        "b/0.001/seed-0": f"it printed nothing (status -9; see {logs[1]})",
    }
    assert len(pretended.names()) == 4
    assert pretended.collect(variants) == ([("c", ONE, 0)], 2)
    pretended.behaviour = {}
    assert pretended.run(variants) == {} and pretended.names() == ["a/0.001/seed-0", "b/0.001/seed-0"]


def test_what_is_added_is_done_alone(pretended):
    a = variant("a", upscale=UPSCALE)
    pretended.run([a])
    assert pretended.names() == ["base", "a/0.001/seed-0", "a+one-row/0.001/seed-0"]
    results = {path: path.read_bytes() for path in (pretended.folder / "out").rglob("*.json")}
    pretended.run([a])
    assert pretended.names() == []
    pretended.run([a, variant("b")], seeds=[0, 1])
    assert pretended.names() == ["b/0.001/seed-0", "a/0.001/seed-1", "b/0.001/seed-1", "a+one-row/0.001/seed-1"]
    # A rate that turns out to be better gets the other seeds, and null controls of its own.
    pretended.behaviour = {"a/0.01/seed-0": {"loss": 1.0}}
    faster = [variant("a", [ONE, TWO], UPSCALE)]
    pretended.run(faster, seeds=[0, 1])
    assert pretended.names() == [*(f"{name}/0.01/seed-{seed}" for name in ("a", "a+one-row") for seed in (0, 1))]
    counted = [("a", ONE, 0), ("a", TWO, 0), ("a", TWO, 1), ("a+one-row", TWO, 0), ("a+one-row", TWO, 1)]
    assert pretended.collect(faster, seeds=[0, 1]) == (counted, 0)
    assert all(path.read_bytes() == content for path, content in results.items())


# What runs do, the rates and the upscaling of a variant, the runs of two seeds beside its first rate's, and how many are missing.
NOT_DONE = {
    "a rate that failed": ({"a/0.01/seed-0": {"exits": 1}}, [ONE, TWO], None, ["a/0.01/seed-0", "a/0.001/seed-1"], 1),
    "a rate of no number": ({"a/0.01/seed-0": {"loss": float("nan")}}, [ONE, TWO], None, ["a/0.01/seed-0", "a/0.001/seed-1"], 0),
    "no rate that is a number": ({"a/0.001/seed-0": {"loss": float("nan")}}, [ONE], UPSCALE, [], 1),
    "a null control": (
        {"a+one-row/0.001/seed-1": {"exits": 1}}, [ONE], UPSCALE,
        ["a/0.001/seed-1", "a+one-row/0.001/seed-0", "a+one-row/0.001/seed-1"], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("behaviour", "rates", "upscale", "others", "missing"), NOT_DONE.values(), ids=NOT_DONE)
def test_a_rate_that_ends_at_no_number_is_not_chosen_and_what_is_not_done_is_counted(
    pretended, behaviour, rates, upscale, others, missing
):
    pretended.behaviour, variants = behaviour, [variant("a", rates, upscale)]
    failing = [key for key, one in behaviour.items() if "exits" in one]
    assert list(pretended.run(variants, seeds=[0, 1])) == failing
    assert pretended.names() == ["base", "a/0.001/seed-0", *others]
    results, counted = pretended.collect(variants, seeds=[0, 1])
    assert counted == missing and len(results) == 1 + len(others) - len(failing)


def another_content(name: str) -> Callable[..., object]:
    return lambda folder, _: (folder / name).write_text("after")


def another_control(folder: Path, _) -> None:
    path = folder / "out/runs/a+one-row/0.001/seed-0.json"
    path.write_text(path.read_text().replace('"n": 1', '"n": 2'))


def another_base(_, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midus_hf.compare.origins.base_digest", lambda base: "another")


OTHER_TEXT = "base was done with another content of the corpus or of a text; expected the same."
# What changes files, keys of the comparison and of the variant, and what is said of it.
CHANGED = {
    "base": (
        None, {"base": "other"}, {},
        "base was done with another base; expected the same. Give the variant another name, choose",
    ),
    # Texts are measured at other steps too, so that the last one is.
    "steps": (
        None, {}, {"train": {"corpus": "corpus", "max_steps": 8}},
        "a/0.001/seed-0 was done with another train.max_steps, train.eval_steps; expected the same.",
    ),
    "a control": (another_control, {}, {}, "a+one-row/0.001/seed-0 was done with another upscale.options.n;"),
    "content of the base": (another_base, {}, {}, "base was done with another content of the base; expected the same."),
    **{name: (another_content(name), {}, {}, OTHER_TEXT) for name in ("corpus", "plants.txt", "herbs.txt")},
}  # fmt: skip


@pytest.mark.parametrize(("change", "changes", "change_of_variant", "message"), CHANGED.values(), ids=CHANGED)
def test_another_request_of_what_is_done_is_refused_before_anything_runs(
    pretended, change, changes, change_of_variant, message, monkeypatch
):
    a = variant("a", upscale=UPSCALE)
    for name in ("corpus", "plants.txt", "herbs.txt"):
        (pretended.folder / name).write_text("before")
    pretended.run([a])
    pretended.names()
    if change is not None:
        change(pretended.folder, monkeypatch)
    with pytest.raises(ValueError) as refused:
        pretended.run([variant("new"), dataclasses.replace(a, **change_of_variant)], **changes)
    assert message in str(refused.value) and pretended.names() == []


def test_another_comparison_in_the_same_output_is_refused_while_one_runs(pretended, monkeypatch):
    refused = []
    begin = pretended.popen

    def starts_another(*words, **options):
        with pytest.raises(ValueError) as error:
            pretended.run([variant("b")])
        refused.append(str(error.value))
        return begin(*words, **options)

    monkeypatch.setattr(running.subprocess, "Popen", starts_another)
    pretended.run([variant("a")])
    assert pretended.names() == ["base", "a/0.001/seed-0"]
    assert refused == 2 * [
        f"output_dir is {str(pretended.folder / 'out')!r}, in which another comparison runs; expected one at a time. Wait for it, or "
        "choose another output_dir; --jobs does several runs at a time."
    ]


def test_what_runs_print_goes_to_their_log_and_they_end_when_a_person_interrupts(tmp_path, monkeypatch, capfd):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho printed; echo $$ > {tmp_path}/number; exec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    number = tmp_path / "number"

    def interrupt(_):
        if number.exists() and number.read_text().strip():
            raise KeyboardInterrupt

    monkeypatch.setattr(running, "time", SimpleNamespace(sleep=interrupt, monotonic=lambda: 0.0))
    monkeypatch.setattr("midus_hf.compare.origins.base_digest", lambda base: f"digest of {base}")
    with pytest.raises(KeyboardInterrupt):
        run_all(comparison(tmp_path), [variant("a")])
    assert (tmp_path / "out/runs/base.log").read_text() == "printed\n" and capfd.readouterr().out == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
