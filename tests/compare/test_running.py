"""All runs of a comparison: in which order, how many beside one another, what is done again and what is let go."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from compare.forked_runs import ForkedRun

import midus_hf.compare
from midus_hf.compare.collecting import collect
from midus_hf.compare.options import Comparison, VariantOptions
from midus_hf.compare.results import read_result
from midus_hf.compare.running import Running
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import Variant

UPSCALE = {"method": "midus-hml", "options": {"n": 4}}
ONE, TWO = {"learning_rate": 1e-3}, {"learning_rate": 1e-2}


class Watched:
    """Remembers what it is told.

    Args:
        models: Where upscaled models are; their names are remembered whenever a run has ended.
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

    Args:
        folder: The working folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.behave()

    def behave(self, **runs) -> None:
        """Tell runs by their names, `base` or `a/0.001/seed-0`, what to do."""
        (self.folder / "behaviour.json").write_text(json.dumps(runs))

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

    def notes(self, moment="began") -> list[dict]:
        """Return what runs have noted at one moment of theirs, in order."""
        path = self.folder / "notes.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [note for note in told if note["moment"] == moment]

    def names(self) -> list[str]:
        """Return the names of the runs that have begun, in order, and forget all notes."""
        names = [note["name"] for note in self.notes()]
        (self.folder / "notes.jsonl").unlink(missing_ok=True)
        return names

    def most_at_once(self) -> int:
        running, most = 0, 0
        for line in (self.folder / "notes.jsonl").read_text().splitlines():
            running += {"began": 1, "ended": -1}[json.loads(line)["moment"]]
            most = max(most, running)
        return most


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    """Return a folder whose runs are pretended in forks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("midus_hf.compare.running._SECONDS_BETWEEN_LOOKS", 0.01)
    forks = SimpleNamespace(Popen=ForkedRun, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("midus_hf.compare.running.subprocess", forks)
    return Place(tmp_path)


@pytest.fixture
def place_of_processes(tmp_path, monkeypatch) -> Place:
    """Let processes of runs find a program that pretends, and all other modules of the package where they are."""
    package = tmp_path / "midus_hf" / "compare"
    package.mkdir(parents=True)
    installed = Path(midus_hf.compare.__file__).parent
    (package.parent / "__init__.py").write_text(f"__path__.append({str(installed.parent)!r})\n")
    (package / "__init__.py").write_text(f"__path__.append({str(installed)!r})\n")
    shutil.copy(Path(__file__).with_name("pretended_run.py"), package / "run_process.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("midus_hf.compare.running._SECONDS_BETWEEN_LOOKS", 0.01)
    return Place(tmp_path)


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


def test_what_runs_print_does_not_come_between_the_caller_and_the_report(place_of_processes, capfd):
    place = place_of_processes
    place.run([variant("a")])
    assert capfd.readouterr() == ("", "")
    assert (place.folder / "out/runs/a/0.001/seed-0/said.txt").read_text() == "printed by a run\n"


def test_null_controls_follow_their_variant_at_its_best_rate(place):
    place.behave(**{f"a/0.01/seed-{seed}": {"loss": 1.0} for seed in (0, 1)})
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
    names = [f"{name}/0.001/seed-0" for name in "abcd"]
    place.behave(**{name: {"seconds": 1.0} for name in names})
    place.run([variant(name) for name in "abcd"], jobs=3)
    assert [note["name"] for note in place.notes()[:1]] == ["base"] and place.most_at_once() == 3
    assert {note["CUDA_VISIBLE_DEVICES"] for note in place.notes()} == {os.environ.get("CUDA_VISIBLE_DEVICES")}
    assert {note["parent"] for note in place.notes()} == {os.getpid()}


def test_each_run_has_a_device_of_its_own(place_of_processes, monkeypatch):
    place = place_of_processes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    names = [f"{name}/0.001/seed-0" for name in "abcd"]
    place.behave(**{name: {"seconds": 0.3} for name in names})
    place.run([variant(name) for name in "abcd"], devices=["3", "5"])
    assert place.most_at_once() == 2
    device, used = {}, {}
    for line in (place.folder / "notes.jsonl").read_text().splitlines():
        note = json.loads(line)
        if note["moment"] == "began":
            device[note["name"]] = note["CUDA_VISIBLE_DEVICES"]
            assert device[note["name"]] not in used.values()
            used[note["name"]] = device[note["name"]]
        else:
            used.pop(note["name"])
    assert set(device.values()) == {"3", "5"}


@pytest.mark.parametrize(("jobs", "threads"), [(1, 8), (3, 2), (20, 1)])
def test_runs_share_the_cores(place, monkeypatch, jobs, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    place.run([variant("a")], jobs=jobs)
    assert {note["OMP_NUM_THREADS"] for note in place.notes()} == {str(threads)}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    place.run([variant("b")], jobs=jobs)
    assert place.notes()[-1]["OMP_NUM_THREADS"] == "7"


def test_what_fails_stops_nothing_else_and_is_done_again(place):
    variants = [variant(name) for name in "abcd"]
    behaviour = {"a": {"fails": "midus train ended with status 2: no."}, "b": {"exits": 3}, "c": {"exits": -9}}
    place.behave(**{f"{name}/0.001/seed-0": told for name, told in behaviour.items()})
    running, watched = place.run(variants)
    assert running.failures == {
        "a/0.001/seed-0": "midus train ended with status 2: no.",
        "b/0.001/seed-0": "ended with status 3: said before the end",
        "c/0.001/seed-0": "ended with status -9: said before the end",
    }
    assert watched.ended_ == {"base": None, **running.failures, "d/0.001/seed-0": None}
    assert len(place.names()) == 5
    place.behave(**{"b/0.001/seed-0": {"exits": 3}})
    running, _ = place.run(variants)
    assert place.names() == [f"{name}/0.001/seed-0" for name in "abc"] and list(running.failures) == ["b/0.001/seed-0"]
    place.behave()
    running, _ = place.run(variants)
    assert place.names() == ["b/0.001/seed-0"] and running.failures == {}


def test_what_is_not_done_is_counted_controls_included(place):
    failed = ["a+one-row/0.001/seed-1", "b/0.001/seed-0", "b/0.001/seed-1"]
    place.behave(**{name: {"fails": "no"} for name in failed})
    variants = [variant("a", upscale=UPSCALE, controls=True), variant("b")]
    place.run(variants, seeds=[0, 1])
    base, results, missing = collect(place.comparison(seeds=[0, 1]), variants)
    assert base is not None and base.variant == "base"
    assert [(one.variant, one.seed) for one in results] == [("a", 0), ("a", 1), ("a+one-row", 0)] and missing == len(
        failed
    )


def test_without_a_base_nothing_else_runs(place):
    place.behave(base={"fails": "there is no such text"})
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
    place.behave(**{f"a/0.01/seed-{seed}": {"loss": 1.0} for seed in (0, 1)})
    place.run([variant("a", [ONE, TWO], UPSCALE, controls=True)], seeds=[0, 1])
    assert place.names() == [*(f"{name}/0.01/seed-{seed}" for name in ("a", "a+one-row") for seed in (0, 1))]


CHANGED = {
    "base": ({"base": "other"}, {}, "base was done with another base; expected the same. Choose another output, or move that folder"),
    "a text": ({"retention": {"stars": "stars.txt"}}, {}, "base was done with another eval_text.stars; expected the same."),
    "steps": (
        {},
        {"train": {"corpus": "corpus", "max_steps": 8}},
        "a/0.001/seed-0 was done with another train.max_steps; expected the same. Give the variant another name, choose another "
        "output, or move that folder away.",
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


class Interrupts(Watched):
    """Ctrl-C comes when a run has noted that it began."""

    def began(self, name: str) -> None:
        super().began(name)
        if len(self.began_) == 3:
            raise KeyboardInterrupt


def test_what_runs_is_told_to_stop_and_waited_for_when_a_person_interrupts(place_of_processes):
    place = place_of_processes
    place.behave(**{f"{name}/0.001/seed-0": {"seconds": 60} for name in "ab"})

    class Waits(Interrupts):
        def began(self, name: str) -> None:
            while len(self.began_) == 2 and len(place.notes()) < 2:
                pass
            super().began(name)

    watching = Waits(place.folder / "out/models")
    with pytest.raises(KeyboardInterrupt):
        place.run([variant("a"), variant("b")], jobs=2, watching=watching)
    assert [note["name"] for note in place.notes("terminated")] == ["a/0.001/seed-0"]
    assert read_result(place.folder / "out/runs/a/0.001/seed-0") is None
