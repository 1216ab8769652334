"""All runs of a comparison: in which order, how many beside one another, what is done again and what is let go."""

import dataclasses
import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midus_hf.compare.measuring import base_request
from midus_hf.compare.options import Comparison, VariantOptions
from midus_hf.compare.results import Point, Result, read_result, write_result
from midus_hf.compare.running import Running
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import collect

UPSCALE = {"method": "midus-hml", "options": {"n": 4}}
ONE, TWO = {"learning_rate": 1e-3}, {"learning_rate": 1e-2}
CONTROLS = {"one-row": {"options": {"n": 1}, "trainable": []}, "shuffled-addresses": {"options": {}, "trainable": []}}


class Watched:
    """Remembers what it is told.

    Args:
        models: Where upscaled models are; their names are remembered whenever a run begins.
    """

    def __init__(self, models: Path):
        self.models, self.runs = models, 0
        self.began_: list[str] = []
        self.ended_: dict[str, str | None] = {}
        self.there: dict[str, list[str]] = {}

    def planned(self, runs: int) -> None:
        self.runs += runs

    def began(self, name: str) -> None:
        self.began_.append(name)
        self.there[name] = sorted(path.name for path in self.models.glob("*") if path.is_dir())

    def ended(self, name: str, failure: str | None) -> None:
        self.ended_[name] = failure


class Place:
    """A folder in which runs are pretended.

    `behaviour` tells of runs by name: a `loss`, `looks` before it ends, `fails` with words, `exits` with a status.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.behaviour: dict[str, dict[str, Any]] = {}
        # Of each run that began: its name, the variables of its process, and the names of the runs beside it.
        self.notes: list[dict[str, Any]] = []
        self.alive: list[str] = []

    def comparison(self, **changes) -> Comparison:
        given = {
            "base": "base",
            "output_dir": str(self.folder / "out"),
            "variants": {"a": VariantOptions()},
            "seeds": [0],
        }
        given |= {"train": {"corpus": "corpus", "max_steps": 4}, "domain": {"plants": "plants.txt"}}
        return Comparison(**{**given, **changes})

    def run(self, variants, jobs=1, devices=(), watching=None, **changes) -> tuple[Running, Watched]:
        watching = watching or Watched(self.folder / "out" / "models")
        running = Running(self.comparison(**changes), variants, watching, jobs, devices)
        running.run()
        return running, watching

    def names(self) -> list[str]:
        """Return the names of the runs that have begun, in order, and forget them."""
        names = [note["name"] for note in self.notes]
        self.notes.clear()
        return names


class PretendedRun:
    """What `Running` uses of `subprocess.Popen`: a run that ends with a result that a test has chosen."""

    def __init__(self, place: Place, line: list[str], *, env, stdin, stdout, stderr, start_new_session):
        assert line[1:3] == ["-m", "midus_hf.compare.run_process"] and stdin is None and start_new_session
        self.place, self.specification, self.stderr = place, Path(line[3]), stderr
        values = json.loads(self.specification.read_text())
        assert values["parent"] == os.getpid()
        variants = {name: VariantOptions(**options) for name, options in values["comparison"]["variants"].items()}
        self.comparison = Comparison(**{**values["comparison"], "variants": variants})
        self.run = None
        if "run" in values:
            self.run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
        self.name = "base" if self.run is None else self.run.name
        self.behaviour = place.behaviour.get(self.name, {})
        self.looks = self.behaviour.get("looks", 0)
        self.returncode = None
        place.notes.append({"name": self.name, "env": env, "beside": list(place.alive)})
        place.alive.append(self.name)

    def poll(self) -> int | None:
        self.looks -= 1
        if self.looks < 0 and self.returncode is None:
            self.place.alive.remove(self.name)
            self.returncode = self._end()
        return self.returncode

    def _end(self) -> int:
        if "fails" in self.behaviour:
            (self.specification.parent / "failed.txt").write_text(self.behaviour["fails"] + "\n")
            return 1
        if "exits" in self.behaviour:
            (self.specification.parent / "said.txt").write_text("said before the end\n")
            return self.behaviour["exits"]
        texts, run = self.comparison.texts, self.run
        curve = [Point(0, 0, None, dict.fromkeys(texts, 3.0))]
        if run is None:
            result = Result("base", {}, 0, curve, request=base_request(self.comparison))
        else:
            variant = run.variant
            curve.append(Point(4, 8, 1.0, dict.fromkeys(texts, self.behaviour.get("loss", 2.0))))
            controls = CONTROLS if variant.upscale is not None and variant.control is None else {}
            of_control = {"control": variant.control, "control_of": variant.control_of}
            request = run.request(self.comparison)
            result = Result(
                variant.name, dict(run.rate), run.seed, curve, controls=controls, **of_control, request=request
            )
        write_result(self.specification.parent, result)
        return 0


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    """Return a folder whose runs are pretended."""
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    pretended = SimpleNamespace(Popen=lambda *line, **options: PretendedRun(place, *line, **options), DEVNULL=None)
    monkeypatch.setattr("midus_hf.compare.running._SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr("midus_hf.compare.running.subprocess", pretended)
    return place


def variant(name: str, rates=(ONE,), upscale=None, controls=False, **changes) -> Variant:
    return Variant(name, upscale, {"corpus": "corpus", "max_steps": 4}, list(rates), controls, **changes)


def make_models(place: Place, *runs: Run) -> None:
    """Make upscaled models as runs leave them."""
    for run in runs:
        model = place.folder / "out" / "models" / str(run.upscaled_name)
        model.mkdir(parents=True)
        entry = {"method": "midus-hml", "plan": [], "base_config": {}, "new_layers": []}
        (model / "config.json").write_text(json.dumps({"upscale": entry}))
        model.with_name(f"{model.name}.json").write_text("{}")


def test_the_base_is_first_and_every_variant_has_a_first_seed_before_one_has_a_second(place):
    running, watched = place.run([variant("a", [ONE, TWO]), variant("b")], seeds=[1, 0])
    expected = ["base"]
    for seed in (1, 0):
        expected += [f"a/0.001/seed-{seed}", f"a/0.01/seed-{seed}", f"b/0.001/seed-{seed}"]
    assert place.names() == expected == watched.began_ and watched.runs == len(expected)
    assert watched.ended_ == dict.fromkeys(expected) and running.failures == {}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts a shell script in the place of the interpreter that runs are started with."""
    monkeypatch.chdir(tmp_path)

    def write(script: str) -> Place:
        (tmp_path / "program").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "program").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))
        return Place(tmp_path)

    return write


def test_what_runs_print_does_not_come_between_the_caller_and_the_report(program, capfd):
    place = program('echo printed; echo "$2 of $OMP_NUM_THREADS" >&2; exit 3')
    running, _ = place.run([variant("a")], jobs=10**6)
    assert capfd.readouterr() == ("", "")
    assert (place.folder / "out/base/said.txt").read_text().startswith("printed\nmidus_hf.compare.run_process of ")
    assert running.failures["base"].startswith("ended with status 3: midus_hf.compare.run_process of ")


def test_what_runs_is_told_to_stop_and_waited_for_when_a_person_interrupts(program):
    place = program("trap 'echo stopped; exit 143' TERM; echo begun; while :; do sleep 0.05; done")

    class Interrupts(Watched):
        """Ctrl-C comes when the run says that it has begun."""

        def ended(self, name: str, failure: str | None) -> None:
            raise AssertionError("the run never ends by itself")

    class Impatient(Running):
        def _begin(self, run: Run | None) -> None:
            super()._begin(run)
            while (self.workplace.root / "base" / "said.txt").read_text() != "begun\n":
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Impatient(place.comparison(), [variant("a")], Interrupts(place.folder)).run()
    assert (place.folder / "out/base/said.txt").read_text() == "begun\nstopped\n"


def test_null_controls_follow_their_variant_at_its_best_rate(place):
    place.behaviour = {f"a/0.01/seed-{seed}": {"loss": 1.0} for seed in (0, 1)}
    place.run([variant("a", [ONE, TWO], UPSCALE, controls=True), variant("b"), variant("c")], seeds=[0, 1])
    assert place.names() == [
        *("base", "a/0.001/seed-0", "a/0.01/seed-0", "b/0.001/seed-0", "c/0.001/seed-0"),
        *("a/0.001/seed-1", "a/0.01/seed-1", "a+one-row/0.01/seed-0", "a+one-row/0.01/seed-1"),
        *("b/0.001/seed-1", "c/0.001/seed-1"),
    ]
    result = read_result(place.folder / "out/runs/a+one-row/0.01/seed-1")
    assert (result.control, result.control_of) == ("one-row", "a")
    assert result.request["upscale"]["options"] == {"n": 1}


def test_several_runs_run_beside_one_another_and_the_base_alone(place):
    place.behaviour = {f"{name}/0.001/seed-0": {"looks": 3} for name in "abcd"}
    place.run([variant(name) for name in "abcd"], jobs=3)
    assert [len(note["beside"]) for note in place.notes] == [0, 0, 1, 2, 0]
    assert {note["env"].get("CUDA_VISIBLE_DEVICES") for note in place.notes} == {
        os.environ.get("CUDA_VISIBLE_DEVICES")
    }


def test_each_run_has_a_device_of_its_own(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    place.behaviour = {
        f"{name}/0.001/seed-0": {"looks": looks} for name, looks in zip("abcd", (3, 1, 3, 1), strict=True)
    }
    place.run([variant(name) for name in "abcd"], devices=["3", "5"])
    device = {note["name"]: note["env"]["CUDA_VISIBLE_DEVICES"] for note in place.notes}
    assert set(device.values()) == {"3", "5"}
    for note in place.notes:
        assert all(device[note["name"]] != device[other] for other in note["beside"]) and len(note["beside"]) < 2


@pytest.mark.parametrize(("jobs", "threads"), [(1, 8), (3, 2), (20, 1)])
def test_runs_share_the_cores(place, monkeypatch, jobs, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    place.run([variant("a")], jobs=jobs)
    assert {note["env"]["OMP_NUM_THREADS"] for note in place.notes} == {str(threads)}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    place.run([variant("b")], jobs=jobs)
    assert place.notes[-1]["env"]["OMP_NUM_THREADS"] == "7"


def test_what_fails_stops_nothing_else_and_is_done_again(place):
    variants = [variant(name) for name in "abcd"]
    behaviour = {"a": {"fails": "midus train ended with status 2: no."}, "b": {"exits": 3}, "c": {"exits": -9}}
    place.behaviour = {f"{name}/0.001/seed-0": told for name, told in behaviour.items()}
    running, watched = place.run(variants)
    assert running.failures == {
        "a/0.001/seed-0": "midus train ended with status 2: no.",
        "b/0.001/seed-0": "ended with status 3: said before the end",
        "c/0.001/seed-0": "ended with status -9: said before the end",
    }
    assert watched.ended_ == {"base": None, **running.failures, "d/0.001/seed-0": None}
    assert len(place.names()) == 5
    place.behaviour = {"b/0.001/seed-0": {"exits": 3}}
    running, _ = place.run(variants)
    assert place.names() == [f"{name}/0.001/seed-0" for name in "abc"] and list(running.failures) == ["b/0.001/seed-0"]
    place.behaviour = {}
    running, _ = place.run(variants)
    assert place.names() == ["b/0.001/seed-0"] and running.failures == {}


def test_what_is_not_done_is_counted_controls_included(place):
    failed = ["a+one-row/0.001/seed-1", "b/0.001/seed-0", "b/0.001/seed-1"]
    place.behaviour = {name: {"fails": "no"} for name in failed}
    variants = [variant("a", upscale=UPSCALE, controls=True), variant("b")]
    place.run(variants, seeds=[0, 1])
    base, results, missing = collect(place.comparison(seeds=[0, 1]), variants)
    assert base is not None and base.variant == "base"
    assert [(one.variant, one.seed) for one in results] == [("a", 0), ("a", 1), ("a+one-row", 0)] and missing == len(
        failed
    )


def test_without_a_base_nothing_else_runs(place):
    place.behaviour = {"base": {"fails": "there is no such text"}}
    running, _ = place.run([variant("a")])
    assert place.names() == ["base"] and running.failures == {"base": "there is no such text"}


def test_what_is_done_is_not_done_again(place):
    variants = [variant("a", [ONE, TWO], UPSCALE, controls=True), variant("b")]
    place.run(variants)
    first = place.names()
    results = {path: path.read_bytes() for path in (place.folder / "out").rglob("result.json")}
    running, watched = place.run(variants)
    assert place.names() == [] == watched.began_ and set(watched.ended_) == set(first)
    assert watched.runs == len(first) and running.failures == {}
    assert {path: path.read_bytes() for path in (place.folder / "out").rglob("result.json")} == results


def test_seeds_rates_variants_and_texts_of_tasks_that_are_added_are_done_alone(place):
    place.run([variant("a", upscale=UPSCALE, controls=True)])
    assert place.names() == ["base", "a/0.001/seed-0", "a+one-row/0.001/seed-0"]
    place.run([variant("a", upscale=UPSCALE, controls=True)], seeds=[0, 1])
    assert place.names() == ["a/0.001/seed-1", "a+one-row/0.001/seed-1"]
    place.run([variant("a", upscale=UPSCALE, controls=True), variant("b")], seeds=[0, 1])
    assert place.names() == ["b/0.001/seed-0", "b/0.001/seed-1"]
    # A rate that turns out to be better has null controls of its own.
    place.behaviour = {f"a/0.01/seed-{seed}": {"loss": 1.0} for seed in (0, 1)}
    place.run([variant("a", [ONE, TWO], UPSCALE, controls=True)], seeds=[0, 1])
    assert place.names() == [*(f"{name}/0.01/seed-{seed}" for name in ("a", "a+one-row") for seed in (0, 1))]


CHANGED = {
    "base": ({"base": "other"}, {}, "base was done with another base; expected the same. Choose another output, or move that folder"),
    "a text": ({"retention": {"stars": "stars.txt"}}, {}, "base was done with another eval_text.stars; expected the same."),
    "steps": (
        {},
        {"train": {"corpus": "corpus", "max_steps": 8}},
        # Texts are measured and checkpoints saved at other steps too, so that the last one is.
        "a/0.001/seed-0 was done with another train.max_steps, train.eval_steps, train.save_steps; expected the same. Give the "
        "variant another name, choose another output, or move that folder away.",
    ),
    "sizes": ({}, {"upscale": {**UPSCALE, "options": {"n": 5}}}, "a/0.001/seed-0 was done with another upscale.options.n; expected"),
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_another_request_of_what_is_done_is_refused_before_anything_runs(place, changed):
    a = variant("a", upscale=UPSCALE)
    place.run([a])
    place.names()
    of_all, of_variant, message = CHANGED[changed]
    with pytest.raises(ValueError) as told:
        place.run([variant("new"), dataclasses.replace(a, **of_variant)], **of_all)
    assert message in str(told.value) and place.names() == []


def test_a_control_that_was_done_with_another_request_is_refused_before_anything_runs(place):
    a = variant("a", upscale=UPSCALE, controls=True)
    place.run([a])
    place.names()
    path = place.folder / "out/runs/a+one-row/0.001/seed-0/result.json"
    path.write_text(path.read_text().replace('"n": 1', '"n": 2'))
    with pytest.raises(ValueError, match=r"a\+one-row/0\.001/seed-0 was done with another upscale\.options\.n;"):
        place.run([a], seeds=[0, 1])
    assert place.names() == []


def test_a_base_whose_result_does_not_say_what_was_asked_for_is_taken(place):
    place.run([variant("a")])
    path = place.folder / "out/base/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "request": {}}))
    place.names()
    place.run([variant("a")])
    assert place.names() == []


def test_upscaled_models_go_when_their_variant_and_its_controls_have_ended(place):
    a, b = variant("a", upscale=UPSCALE, controls=True), variant("b", upscale=UPSCALE)
    comparison = place.comparison()
    (of_a,), (of_b,) = runs_of(a, comparison), runs_of(b, comparison)
    make_models(place, of_a, of_b)
    _, watched = place.run([a, b])
    both = sorted([of_a.upscaled_name, of_b.upscaled_name])
    assert watched.there["a+one-row/0.001/seed-0"] == both
    assert watched.there["b/0.001/seed-0"] == [of_b.upscaled_name]
    assert not (place.folder / "out/models").exists()


def test_upscaled_models_of_what_is_done_go_with_the_next_run(place):
    a = variant("a", upscale=UPSCALE)
    place.run([a])
    make_models(place, *runs_of(a, place.comparison()))
    place.run([a])
    assert not (place.folder / "out/models").exists()


def test_models_stay_where_they_are_to_be_kept(place):
    a = variant("a", upscale=UPSCALE)
    make_models(place, *runs_of(a, place.comparison()))
    place.run([a], keep_models=True)
    assert len(list((place.folder / "out/models").iterdir())) == 2


def test_a_model_with_a_person_s_file_stays_and_is_known(place):
    a = variant("a", upscale=UPSCALE)
    (run,) = runs_of(a, place.comparison())
    make_models(place, run)
    (place.folder / "out/models" / run.upscaled_name / "note.txt").write_text("mine")
    place.run([a])
    assert {path.name for path in (place.folder / "out/models").iterdir()} == {
        run.upscaled_name,
        f"{run.upscaled_name}.json",
    }


def test_a_run_that_was_measured_goes_with_the_next_one_but_for_a_person_s_files(place):
    a = variant("a")
    place.run([a])
    trained = place.folder / "out/runs/a/0.001/seed-0/trained"
    trained.mkdir()
    (trained / "model.safetensors").write_text("weights")
    place.run([a], keep_models=True)
    assert (trained / "model.safetensors").exists()
    (trained / "note.txt").write_text("mine")
    place.run([a])
    assert [path.name for path in trained.iterdir()] == ["note.txt"]


def test_another_comparison_in_the_same_output_is_refused_while_one_runs(place):
    refused = []

    class StartsAnother(Watched):
        def began(self, name: str) -> None:
            with pytest.raises(ValueError) as told:
                place.run([variant("b")])
            refused.append(str(told.value))

    place.run([variant("a")], watching=StartsAnother(place.folder))
    message = (
        f"output_dir is {str(place.folder / 'out')!r}, in which another comparison runs; expected one at a time. Wait for it, or "
        "choose another output_dir; --jobs does several runs at a time."
    )
    assert refused == [message, message]
    assert place.names() == ["base", "a/0.001/seed-0"]
    place.run([variant("b")])
    assert place.names() == ["b/0.001/seed-0"]


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that has none."""

    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)


def test_where_a_file_system_has_no_locks_a_comparison_says_so_and_goes_on(place, no_locks, capsys):
    place.run([variant("a")])
    assert place.names() == ["base", "a/0.001/seed-0"]
    assert capsys.readouterr().err.startswith(
        f"output {place.folder / 'out'} is not guarded: its file system has no locks."
    )


def test_where_a_file_system_has_no_locks_runs_beside_one_another_are_refused(place, no_locks):
    message = "whose file system has no locks, .* expected one run at a time. Choose --jobs 1 without --devices, or another output"
    with pytest.raises(ValueError, match=message):
        place.run([variant("a")], jobs=2)
    assert place.names() == []
