"""One run from upscaling to its result: what is measured is what commands measure, what is done stays, what is in the way goes."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare.small_comparison import HEADWISE, STEPS, TOKENS_PER_STEP, InProcess, Measured, write_room
from evaluation.questions import write_questions
from pairs import by_default
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.compare.commands import StepFailed
from midus_hf.compare.measuring import Evaluations
from midus_hf.compare.results import read_result
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import Variant, available_controls, control_variants
from midus_hf.compare.workplace import BASE, control_runs

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    folder = write_room(tmp_path_factory.mktemp("room"))
    write_questions(folder / "questions")
    return folder


def tasks_of(room: Path) -> dict[str, Any] | None:
    """A task whose questions lie in the room; none where nothing could ask them."""
    return {"names": ["piqa"], "limit": 2, "data": str(room / "questions")} if HAS_HARNESS else None


def perplexity_loss(model, text, *words) -> float:
    """Loss of a text as `midus eval` measures it, in nats per token."""
    words = ("--sequence-length", 32, *words)  # as in training
    report = json.loads(InProcess().run("eval", "midus eval", model, "--text", text, "--json", *words).output)
    return math.log(report["models"][0]["perplexity"]["perplexity"])


def packed_loss(folder, text) -> float:
    """Loss of a text as the Trainer measures it: sequences of 32 tokens, of each of which the first is not predicted."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = [*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id]
    sequences = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    with torch.no_grad():
        return model.eval()(input_ids=sequences, labels=sequences).loss.item()


def accuracy(model, room) -> dict[str, float]:
    words = [model, "--tasks", "piqa", "--data", room / "questions", "--limit", 2, "--json"]
    return json.loads(InProcess().run("eval", "midus eval", *words).output)["models"][0]["tasks"]["piqa"]


@pytest.fixture(scope="module")
def kept(room, tmp_path_factory):
    """A comparison of a memory and of the base trained whole whose models stay, with their results."""
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}, "full": {"train": {"learning_rate": 1e-3}}}
    output = tmp_path_factory.mktemp("kept")
    measured = Measured(room, output, variants, keep_models=True, tasks=tasks_of(room))
    base = measured.measure_base()
    return measured, base, {run.variant.name: (run, measured.measure(run)) for run in measured.runs()}


def with_the_base_of(kept, measured: Measured) -> Measured:
    """A comparison for which the base was measured already."""
    shutil.copytree(kept[0].place.root / BASE, measured.place.root / BASE)
    return measured


@pytest.mark.parametrize("variant", ["hml", "full"])
def test_the_ends_of_the_curve_are_losses_of_packed_sequences(room, kept, variant):
    measured, base, results = kept
    run, result = results[variant]
    paths = measured.paths(run)
    start = paths.model if variant == "hml" else room / "base"
    for name in ("plants", "stars"):
        text = room / f"{name}.txt"
        assert base.end.losses[name] == perplexity_loss(room / "base", text)
        assert result.start.losses[name] == pytest.approx(packed_loss(start, text), rel=1e-5)
        assert result.end.losses[name] == pytest.approx(packed_loss(paths.trained, text), rel=1e-5)
    assert result.end.losses["plants"] < result.start.losses["plants"]
    assert [(point.step, point.tokens) for point in result.curve] == [
        (step, step * TOKENS_PER_STEP) for step in (0, STEPS // 2, STEPS)
    ]
    assert result.seconds > 0


def test_a_run_says_which_run_it_was(kept):
    measured, base, results = kept
    (_, hml), (_, full) = results["hml"], results["full"]
    assert (hml.variant, hml.rate, hml.seed, hml.control, hml.control_of) == (
        "hml",
        {"learning_rate": 1e-2},
        0,
        None,
        None,
    )
    assert (full.variant, full.rate, full.controls, full.shuffled) == ("full", {}, {}, None)
    assert (hml.starts_at_base, full.starts_at_base) == (True, None)
    assert hml.upscaled is full.upscaled is None
    assert (base.variant, base.curve[0].step, len(base.curve)) == ("base", 0, 1)
    for run, result in results.values():
        assert result.request == json.loads(json.dumps(run.request(measured.comparison)))
        assert result.peak_memory_bytes > 10**7


def count(folder: Path) -> int:
    """Parameters of a model, without the statistics that its buffers hold."""
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_numbers_of_parameters_are_those_of_the_files(room, kept):
    measured, _, results = kept
    base = count(room / "base")
    run, hml = results["hml"]
    assert hml.new_parameters == hml.trained_parameters == count(measured.paths(run).model) - base > 0
    _, full = results["full"]
    assert (full.new_parameters, full.trained_parameters) == (0, base)


@needs_harness
@pytest.mark.parametrize("variant", ["hml", "full"])
def test_tasks_are_asked_before_and_after(room, kept, variant):
    measured, base, results = kept
    run, result = results[variant]
    assert base.tasks["piqa"] == accuracy(room / "base", room) == result.tasks_before["piqa"]
    assert result.tasks["piqa"] == accuracy(measured.paths(run).trained, room)
    # What starts as the base has the base's answers, which are not asked for again.
    assert "tasks-before" not in measured.commands.steps


@needs_harness
@pytest.mark.parametrize(
    ("upscale", "starts"),
    [({"method": "solar"}, False), ({"method": "solar", "verify": False}, None)],
    ids=["other", "not verified"],
)
def test_tasks_are_asked_of_a_model_that_was_not_seen_to_start_as_the_base(room, tmp_path, upscale, starts):
    variants = {"a": {"upscale": upscale}}
    measured = Measured(room, tmp_path, variants, tasks=tasks_of(room), controls=False)
    measured.measure_base()
    (run,) = measured.runs()
    result = measured.measure(run)
    assert measured.commands.steps.count("tasks-before") == 1
    assert result.tasks_before["piqa"] == accuracy(measured.paths(run).model, room)
    assert result.starts_at_base is starts
    # The upscaled model is measured as the base is, and not only by the Trainer.
    for name in ("plants", "stars"):
        assert result.upscaled[name] == perplexity_loss(measured.paths(run).model, room / f"{name}.txt")


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_a_result_says_whether_its_model_is_causal(room, tmp_path, routing):
    options = {"memory_tokens": 16, "chapters": 4, "k": 2, "routing": routing}
    variants = {"a": {"upscale": {"method": "moc", "options": options}}}
    measured = Measured(room, tmp_path, variants, controls=False)
    measured.measure_base()
    (run,) = measured.runs()
    assert measured.measure(run).is_causal is (routing == "chunk")


def test_shuffled_addresses_are_those_of_the_trained_model(room, kept, tmp_path):
    measured, _, results = kept
    run, result = results["hml"]
    InProcess().run(
        "shuffle", "upscale", "shuffle", measured.paths(run).trained, "--output", tmp_path / "out", "--seed", 0
    )
    for name in ("plants", "stars"):
        assert result.shuffled[name] == perplexity_loss(tmp_path / "out", room / f"{name}.txt")
        assert result.saved[name] == perplexity_loss(measured.paths(run).trained, room / f"{name}.txt")
    assert result.shuffled["plants"] != result.saved["plants"]
    assert not (measured.paths(run).folder / "shuffled").exists()


@pytest.mark.parametrize("controls", [False, ["one-row"]], ids=["none", "another"])
def test_addresses_are_shuffled_only_where_that_is_asked_for(room, kept, tmp_path, controls):
    measured = Measured(room, tmp_path, {"hml": {"upscale": HEADWISE}}, controls=controls)
    with_the_base_of(kept, measured)
    (run,) = measured.runs()
    result = measured.measure(run)
    assert result.shuffled is None and result.saved is None and "shuffle" not in measured.commands.steps
    assert list(result.controls) == ["one-row", "random-slots", "frozen-addresses", "shuffled-addresses"]


def test_what_stays_of_a_run_is_its_result_and_its_log_and_what_a_person_put_there(room, kept, tmp_path):
    measured = Measured(room, tmp_path, {"hml": {"upscale": HEADWISE}, "full": {}}, controls=False)
    with_the_base_of(kept, measured)
    hml, full = measured.runs()
    for run in (hml, full):
        measured.measure(run)
    paths = measured.paths(hml)
    assert {path.name for path in paths.folder.iterdir()} == {"result.json", "log.jsonl", "train.yaml"}
    assert (paths.model / "model.safetensors").is_file()
    measured.place.remove_upscaled(hml.upscaled_name)
    assert not measured.place.models.exists()
    measured.place.remove_upscaled(hml.upscaled_name)


class WithNotes(InProcess):
    """A person puts a note into every folder that a command makes."""

    def run(self, step, command, *words):
        done = super().run(step, command, *words)
        folder = {"upscale": "--output", "shuffle": "--output"}.get(step)
        if folder is not None:
            (Path(words[words.index(folder) + 1]) / "note.txt").write_text("mine")
        if step == "train":
            (Path(words[0]).parent / "trained" / "note.txt").write_text("mine")
            (Path(words[0]).parent / "note.txt").write_text("mine")
        return done


def test_a_person_s_files_stay_wherever_they_are(room, kept, tmp_path):
    measured = Measured(room, tmp_path, {"hml": {"upscale": HEADWISE}})
    measured.commands = WithNotes()
    with_the_base_of(kept, measured)
    (run,) = measured.runs()
    measured.measure(run)
    measured.place.remove_upscaled(run.upscaled_name)
    paths = measured.paths(run)
    for folder in (paths.folder, paths.trained, paths.folder / "shuffled", paths.model):
        assert (folder / "note.txt").read_text() == "mine"
    assert [path.name for path in paths.trained.iterdir()] == ["note.txt"]
    # The model is whole, and taken where a run needs it again.
    shutil.rmtree(paths.folder)
    measured.commands = InProcess()
    measured.comparison.controls = False
    measured.measure(run)
    assert "upscale" not in measured.commands.steps


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param("upscale", marks=pytest.mark.product),
        "train",
        pytest.param("tasks", marks=needs_harness),
        pytest.param("shuffle", marks=pytest.mark.product),
        "shuffled-stars",
    ],
)
def test_a_run_goes_on_where_it_failed(room, kept, tmp_path, fails):
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}}
    measured = Measured(room, tmp_path, variants, tasks=tasks_of(room))
    with_the_base_of(kept, measured)
    (run,) = measured.runs()
    measured.commands = InProcess(fails)
    with pytest.raises(StepFailed):
        measured.measure(run)
    assert read_result(measured.place.run_folder(run)) is None
    before, measured.commands = measured.commands.steps, InProcess()
    result = measured.measure(run)
    done = before[: before.index(fails)]
    # What was shuffled is gone.
    assert set(done) & set(measured.commands.steps) <= {"shuffle", "shuffled-plants", "shuffled-stars"}
    _, _, whole = kept
    expected = whole["hml"][1]
    assert [point.losses for point in result.curve] == [point.losses for point in expected.curve]
    assert (result.tasks, result.shuffled) == (expected.tasks, expected.shuffled)
    assert (result.trained_parameters, result.new_parameters) == (expected.trained_parameters, expected.new_parameters)
    assert result.peak_memory_bytes > 10**7


def test_a_model_that_was_upscaled_and_not_told_of_is_upscaled_again(room, kept, tmp_path):
    measured = Measured(room, tmp_path, {"hml": {"upscale": HEADWISE}}, controls=False)
    with_the_base_of(kept, measured)
    (run,) = measured.runs()
    measured.commands = InProcess("train")
    with pytest.raises(StepFailed):
        measured.measure(run)
    model = measured.paths(run).model
    # Half of it was removed when the process was killed.
    (model.parent / f"{model.name}.json").unlink()
    (model / "model.safetensors").unlink()
    (model / "upscale.json").unlink()
    measured.commands = InProcess()
    assert measured.measure(run).end.step == STEPS


def test_a_run_that_was_killed_behind_its_last_checkpoint_goes_on(room, kept, tmp_path):
    measured = Measured(room, tmp_path, {"full": {}}, keep_models=True)
    with_the_base_of(kept, measured)
    (run,) = measured.runs()
    before = measured.measure(run)
    paths = measured.paths(run)
    # As it is before the last line of the log, which tells what the run cost, and before the model.
    for name in ("config.json", "model.safetensors"):
        (paths.trained / name).unlink()
    (paths.folder / "result.json").unlink()
    log = (paths.trained / "log.jsonl").read_text().splitlines(keepends=True)
    assert "trained_parameters" in log[-1]
    (paths.trained / "log.jsonl").write_text("".join(log[:-1]))
    result = measured.measure(run)
    assert result.curve == before.curve
    assert result.trained_parameters == before.trained_parameters
    assert result.seconds >= before.end.seconds > 0, "the time before the kill counts"


def test_texts_are_read_as_the_corpus_is(room, tmp_path):
    for name in ("plants", "stars", "corpus"):
        text = (
            (room / f"{name}.txt").read_text()
            if name != "corpus"
            else "\n".join(path.read_text() for path in sorted((room / "corpus").iterdir()))
        )
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": text, "text": "none"}) + "\n", encoding="utf-8")
    texts = {
        "domain": {"plants": str(tmp_path / "plants.jsonl")},
        "retention": {"stars": str(tmp_path / "stars.jsonl")},
    }
    corpus = {"corpus": str(tmp_path / "corpus.jsonl"), "text_column": "body"}
    measured = Measured(room, tmp_path / "out", {"full": {}}, train=corpus, **texts)
    base = measured.measure_base()
    assert base.end.losses["plants"] == perplexity_loss(room / "base", room / "plants.txt")
    (run,) = measured.runs()
    assert measured.measure(run).start.losses == pytest.approx(base.end.losses, rel=0.03)


def test_the_base_is_measured_document_by_document_where_runs_fetch_by_paths(room, tmp_path):
    words = (room / "plants.txt").read_text().split()
    rows = [{"text": " ".join(words[start : start + 10]), "memory_ids": [0]} for start in (0, 10, 20)]
    (tmp_path / "plants.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"domain": {"plants": str(tmp_path / "plants.jsonl")}}
    base = Measured(room, tmp_path / "out", {"full": {}}, train={"path_column": "memory_ids"}, **texts).measure_base()
    apart = perplexity_loss(room / "base", tmp_path / "plants.jsonl", "--set", "apart=true")
    assert base.end.losses["plants"] == apart != perplexity_loss(room / "base", tmp_path / "plants.jsonl")
    assert base.end.losses["stars"] == perplexity_loss(room / "base", room / "stars.txt")


def test_what_is_measured_behind_training_fetches_by_the_paths_that_training_fetched_by(room, tmp_path):
    (tmp_path / "plants.jsonl").write_text(json.dumps({"text": "w1 w2 w3", "memory_ids": [0]}) + "\n")
    texts = {"domain": {"plants": str(tmp_path / "plants.jsonl")}}
    measured = Measured(room, tmp_path / "out", {"full": {}}, train={"path_column": "memory_ids"}, **texts)
    asked = {}

    class Told:
        def run(self, step, command, *words):
            asked[step] = [str(word) for word in words]
            return SimpleNamespace(output=json.dumps({"models": [{"perplexity": {"perplexity": 2.0}}]}))

    evaluations = Evaluations(tmp_path, measured.comparison, Told())
    evaluations.losses("tuned", "tuned", {"path_column": "memory_ids"})
    assert asked["tuned-plants"][-2:] == ["--set", 'path_column="memory_ids"'] and not any(
        "path_column" in word for word in asked["tuned-stars"]
    )


ALL_CONTROLS = ["one-row", "random-slots", "frozen-addresses", "shuffled-addresses"]
METHODS = {
    "midus-hml": (HEADWISE, ALL_CONTROLS),
    "midus-pkm": ({"method": "midus-pkm", "num_new_layers": 1, "options": {"n": 4, "k": 2}}, ALL_CONTROLS),
    "midus-linear": ({"method": "midus-linear", "num_new_layers": 1, "options": {"slots": 6, "k": 2}}, ALL_CONTROLS),
    "moc": (
        {"method": "moc", "options": {"layers": 1, "memory_tokens": 12, "chapters": 6, "k": 2, "chunk_size": 4}},
        ALL_CONTROLS,
    ),
    "ultramem-v2": ({"method": "ultramem-v2", "options": {"n": 8, "k": 4, "share": "ring:4"}}, ALL_CONTROLS),
    "moda": ({"method": "moda"}, []),
    "llama-pro": ({"method": "llama-pro", "num_new_layers": 1}, []),
}


@pytest.fixture(scope="module")
def upscaled(room, tmp_path_factory):
    """Return a function that upscales once per method, and returns the variant and the config of the model."""
    found: dict[str, tuple[Measured, Variant, dict]] = {}

    def of(method: str) -> tuple[Measured, Variant, dict]:
        if method not in found:
            measured = Measured(room, tmp_path_factory.mktemp(method), {method: {"upscale": METHODS[method][0]}})
            (run,) = measured.runs()
            measured.commands = InProcess("train")
            measured.place.run_folder(run).mkdir(parents=True)
            with pytest.raises(StepFailed):
                measured.measure(run)
            found[method] = measured, run.variant, json.loads((measured.paths(run).model / "config.json").read_text())
        return found[method]

    return of


# One memory that is attached; that others have all null controls is said in tests/config/test_controls.py.
@pytest.mark.parametrize("method", by_default(["moc", "moda", "llama-pro"], list(METHODS)))
def test_which_null_controls_a_method_has(upscaled, method):
    _, variant, config = upscaled(method)
    controls = available_controls(config)
    assert list(controls) == METHODS[method][1]
    assert [one.name for one in control_variants(variant, controls, {})] == [
        f"{method}+{name}" for name in METHODS[method][1] if name != "shuffled-addresses"
    ]


CONTROLS = [(method, name) for method, (_, names) in METHODS.items() for name in names if name != "shuffled-addresses"]

# Every null control, of memories that are inserted and of one that is attached.
CHOSEN = [("midus-hml", "one-row"), ("midus-pkm", "frozen-addresses"), ("moc", "random-slots")]


@pytest.mark.parametrize(("method", "name"), by_default(CHOSEN, CONTROLS))
def test_a_control_is_upscaled_and_trained_beside_its_variant(upscaled, room, kept, tmp_path, method, name):
    _, variant, config = upscaled(method)
    (control,) = [
        one
        for one in control_variants(variant, available_controls(config), {"learning_rate": 5e-3})
        if one.control == name
    ]
    measured = Measured(room, tmp_path, {method: {"upscale": METHODS[method][0]}}, train={"max_steps": 1})
    control = Variant(**{**vars(control), "train": {**control.train, "max_steps": 1}})
    with_the_base_of(kept, measured)
    (run,) = runs_of(control, measured.comparison)
    result = measured.measure(run)
    assert (result.variant, result.control, result.control_of) == (f"{method}+{name}", name, method)
    assert result.rate == {"learning_rate": 5e-3} and result.starts_at_base is True
    assert result.shuffled is None and result.controls == {} and "shuffle" not in measured.commands.steps
    new = count(measured.paths(run).model) - count(room / "base")
    assert result.new_parameters == new
    if name == "frozen-addresses":
        assert run.upscaled_name == Run(variant, {}, 0).upscaled_name
        assert 0 < result.trained_parameters < new
    else:
        assert 0 < result.trained_parameters <= new
        assert (new < variant.new_parameters) == (name == "one-row")


def test_controls_follow_the_rate_that_was_best(room, kept):
    measured, _, results = kept
    run, result = results["hml"]
    runs = control_runs(run.variant, [result], measured.comparison)
    assert [one.name for one in runs] == [
        f"hml+{name}/0.01/seed-0" for name in ("one-row", "random-slots", "frozen-addresses")
    ]
    assert control_runs(run.variant, [], measured.comparison) == []
