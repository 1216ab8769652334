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


class PretendedRuns:
    """A folder in which runs are pretended.

    `behaviour` tells of runs by name: a `loss` of the validation text, `looks` before it ends, `exits` with a status and `prints`
    before.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.behaviour: dict[str, dict[str, Any]] = {}
        # Of each run that began: its name, the variables of its process, and the names of the runs beside it.
        self.notes: list[dict[str, Any]] = []
        self.alive: list[str] = []

    def run(self, variants, jobs=1, devices=(), **changes) -> dict[str, str]:
        return run_all(comparison(self.folder, **changes), variants, jobs, devices)

    def names(self) -> list[str]:
        """Return the names of the runs that have begun, in order, and forget them."""
        names = [note["name"] for note in self.notes]
        self.notes.clear()
        return names

    def popen(self, words, *, env, stdin, stdout, stderr, text, start_new_session) -> Any:
        """Return what `running` uses of `subprocess.Popen`: a run that ends with a result that a test has chosen."""
        assert words[1:] == ["-m", "midus_hf.compare.one_run"] and start_new_session and stdout is stderr
        process = SimpleNamespace(returncode=None, looks=0)

        class Input:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def write(_, words: str) -> None:
                values = json.loads(words)
                assert values["parent"] == os.getpid()
                process.run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
                process.inputs = values["inputs"]
                process.behaviour = self.behaviour.get(process.run.name, {})
                process.looks = process.behaviour.get("looks", 0)
                Path(stderr.name).write_text(process.behaviour.get("prints", ""))
                self.notes.append({"name": process.run.name, "env": env, "beside": list(self.alive)})
                self.alive.append(process.run.name)

        def poll() -> int | None:
            process.looks -= 1
            if process.looks < 0 and process.returncode is None:
                self.alive.remove(process.run.name)
                process.returncode = process.behaviour.get("exits", 0)
                if not process.returncode:
                    self._write_result(process.run, process.behaviour.get("loss", 2.0), process.inputs)
            return process.returncode

        class Process:
            stdin = Input()
            returncode = property(lambda _: process.returncode)

            def poll(self) -> int | None:
                return poll()

        return Process()

    def _write_result(self, run: Run, loss: float, inputs: dict[str, str]) -> None:
        one = comparison(self.folder)
        controls = CONTROLS if run.variant.upscale is not None and run.variant.control is None else {}
        curve = [Point(step, {"plants": 2.0, "herbs": loss if step else 3.0}) for step in (0, 4)]
        names = {"control": run.variant.control, "control_of": run.variant.control_of, "controls": controls}
        result = Result(run.variant.name, run.rate, run.seed, curve, request=run.request(one), origin=inputs, **names)
        write_result(run.folder(one), result)


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


def test_several_runs_run_beside_one_another_and_the_base_alone(pretended):
    pretended.behaviour = {f"{name}/0.001/seed-0": {"looks": 3} for name in "abcd"}
    pretended.run([variant(name) for name in "abcd"], jobs=3)
    assert [len(note["beside"]) for note in pretended.notes] == [0, 0, 1, 2, 0]
    assert {note["env"].get("CUDA_VISIBLE_DEVICES") for note in pretended.notes} == {
        os.environ.get("CUDA_VISIBLE_DEVICES")
    }


def test_each_run_has_a_device_of_its_own(pretended, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    looks = zip("abcd", (3, 1, 3, 1), strict=True)
    pretended.behaviour = {f"{name}/0.001/seed-0": {"looks": number} for name, number in looks}
    pretended.run([variant(name) for name in "abcd"], devices=["3", "5"])
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


def test_what_fails_stops_nothing_else_and_is_done_again(pretended):
    variants = [variant(name) for name in "abc"]
    pretended.behaviour = {
        "a/0.001/seed-0": {"prints": "Traceback\nValueError: no.\n\n", "exits": 1},
        "b/0.001/seed-0": {"exits": -9},
    }
    logs = [pretended.folder / f"out/runs/{name}/0.001/seed-0.log" for name in "ab"]
    assert pretended.run(variants) == {
        "a/0.001/seed-0": f"ValueError: no. (status 1; see {logs[0]})",
        "b/0.001/seed-0": f"it said nothing (status -9; see {logs[1]})",
    }
    assert len(pretended.names()) == 4
    base, results, missing = collect(comparison(pretended.folder), variants)
    assert base is not None and [one.variant for one in results] == ["c"] and missing == 2
    pretended.behaviour = {}
    assert pretended.run(variants) == {} and pretended.names() == ["a/0.001/seed-0", "b/0.001/seed-0"]


def test_without_a_base_nothing_else_runs(pretended):
    pretended.behaviour = {"base": {"prints": "there is no such text", "exits": 1}}
    failures = pretended.run([variant("a")])
    assert pretended.names() == ["base"] and failures["base"].startswith("there is no such text (status 1; see ")


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
    _, counted, missing = collect(comparison(pretended.folder, seeds=[0, 1]), faster)
    assert missing == 0 and [(one.variant, one.rate, one.seed) for one in counted] == [
        *(("a", ONE, 0), ("a", TWO, 0), ("a", TWO, 1)),
        *(("a+one-row", TWO, seed) for seed in (0, 1)),
    ]
    assert all(path.read_bytes() == content for path, content in results.items())


@pytest.mark.parametrize("fast", [{"exits": 1}, {"loss": float("nan")}], ids=["failed", "not finite"])
def test_a_rate_that_fails_or_ends_at_no_number_is_not_chosen(pretended, fast):
    pretended.behaviour = {"a/0.01/seed-0": fast}
    a = variant("a", [ONE, TWO])
    assert list(pretended.run([a], seeds=[0, 1])) == ["a/0.01/seed-0"] * ("exits" in fast)
    assert pretended.names() == ["base", "a/0.001/seed-0", "a/0.01/seed-0", "a/0.001/seed-1"]
    assert collect(comparison(pretended.folder, seeds=[0, 1]), [a])[2] == ("exits" in fast)


def test_where_no_rate_ends_at_a_number_there_is_no_second_seed(pretended):
    pretended.behaviour = {"a/0.001/seed-0": {"loss": float("nan")}}
    a = variant("a", upscale=UPSCALE)
    pretended.run([a], seeds=[0, 1])
    assert pretended.names() == ["base", "a/0.001/seed-0"]
    assert collect(comparison(pretended.folder, seeds=[0, 1]), [a])[2] == 1


def test_null_controls_that_are_not_done_are_counted(pretended):
    pretended.behaviour = {"a+one-row/0.001/seed-1": {"exits": 1}}
    variants = [variant("a", upscale=UPSCALE)]
    pretended.run(variants, seeds=[0, 1])
    _, results, missing = collect(comparison(pretended.folder, seeds=[0, 1]), variants)
    assert [(one.variant, one.seed) for one in results] == [("a", 0), ("a", 1), ("a+one-row", 0)] and missing == 1


def written(name: str) -> Callable[..., object]:
    """What changes a file of the comparison's folder."""
    return lambda folder, _: (folder / name).write_text("after")


def of_a_control(folder: Path, _) -> None:
    """The result of a null control, as another request would have left it."""
    path = folder / "out/runs/a+one-row/0.001/seed-0.json"
    path.write_text(path.read_text().replace('"n": 1', '"n": 2'))


def of_the_base(_, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midus_hf.compare.origins.base_digest", lambda base: "another")


OTHER_TEXT = "base was done with another content of the corpus or of a text; expected the same."
# What changes files, keys of the comparison and of the variant, and what is said of it.
CHANGED = {
    "base": (
        None, {"base": "other"}, {},
        "base was done with another base; expected the same. Give the variant another name, choose",
    ),
    "a text": (None, {"retention": {"stars": "stars.txt"}}, {}, "base was done with another texts.stars; expected the same."),
    # Texts are measured at other steps too, so that the last one is.
    "steps": (
        None, {}, {"train": {"corpus": "corpus", "max_steps": 8}},
        "a/0.001/seed-0 was done with another train.max_steps, train.eval_steps; expected the same.",
    ),
    "sizes": (
        None, {}, {"upscale": {**UPSCALE, "options": {"n": 5}}},
        "a/0.001/seed-0 was done with another upscale.options.n; expected",
    ),
    "a control": (of_a_control, {}, {}, "a+one-row/0.001/seed-0 was done with another upscale.options.n;"),
    "content of the base": (of_the_base, {}, {}, "base was done with another content of the base; expected the same."),
    **{name: (written(name), {}, {}, OTHER_TEXT) for name in ("corpus", "plants.txt", "herbs.txt")},
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_another_request_of_what_is_done_is_refused_before_anything_runs(pretended, changed, monkeypatch):
    a = variant("a", upscale=UPSCALE)
    for name in ("corpus", "plants.txt", "herbs.txt"):
        (pretended.folder / name).write_text("before")
    pretended.run([a])
    pretended.names()
    change, changes, change_of_variant, message = CHANGED[changed]
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
    message = (
        f"output_dir is {str(pretended.folder / 'out')!r}, in which another comparison runs; expected one at a time. Wait for it, or "
        "choose another output_dir; --jobs does several runs at a time."
    )
    assert refused == [message, message] and pretended.names() == ["base", "a/0.001/seed-0"]


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
