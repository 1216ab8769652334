"""One run from upscaling to its result: what is measured is what the commands measure, and one file stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compare.small_comparison import HEADWISE, STEPS, TOKENS_PER_STEP, SmallComparison, write_room
from evaluation.questions import write_questions
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.compare.plan import Run, control_variants
from midus_hf.compare.run import read_result, request_of, write_result
from midus_hf.evaluation.evaluate import EvaluationSettings, evaluate
from midus_hf.files.checkpoint_files import CONFIG_FILE
from scripts.anatomy.tiny import tiny_model as any_type
from upscalers import upscale
from upscalers.edits.checkpoint_edit import shuffle

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    folder = write_room(tmp_path_factory.mktemp("room"))
    write_questions(folder / "questions")
    return folder


def tasks_in(room: Path) -> dict[str, Any]:
    """A task whose questions lie in the room; none where nothing could ask them."""
    return {"names": ["piqa"], "limit": 2, "data": str(room / "questions")}


def packed_loss(folder: Path, text: Path) -> float:
    """Return the loss of a text as the Trainer measures it: sequences of 32 tokens, of each of which the first is not predicted."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = [*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id]
    sequences = [torch.tensor([ids[begin : begin + 32]]) for begin in range(0, len(ids), 32)]
    if len(ids) % 32 in (0, 1) or (len(ids) % 32) / len(ids) <= 0.01:
        sequences = sequences[: len(ids) // 32]
    counts = [one.shape[1] - 1 for one in sequences]
    with torch.no_grad():
        losses = [model.eval()(input_ids=one, labels=one).loss.item() for one in sequences]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def accuracy(model: Path, room: Path) -> dict[str, float]:
    settings = EvaluationSettings(tasks=["piqa"], data=str(room / "questions"), limit=2)
    return evaluate([str(model)], settings)["models"][0]["tasks"]["piqa"]


@pytest.fixture(scope="module")
def kept(room, tmp_path_factory):
    """Return a comparison of a memory and of the base trained whole whose models stay, with the base's result and theirs."""
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}, "full": {"train": {"learning_rate": 1e-3}}}
    comparing = SmallComparison(room, tmp_path_factory.mktemp("kept"), variants, tasks=tasks_in(room))
    base = comparing.measure_base()
    return comparing, base, {run.variant.name: (run, comparing.measure(run, keep=True)) for run in comparing.runs()}


def with_the_base_of(kept, comparing: SmallComparison) -> SmallComparison:
    """Return a comparison for which the base was measured already."""
    write_result(Path(comparing.comparison.output_dir, "runs", "base"), kept[1])
    return comparing


@pytest.mark.parametrize("variant", ["hml", "full"])
def test_curve_ends_are_losses_of_packed_sequences(room, kept, variant):
    comparing, base, results = kept
    run, result = results[variant]
    start = comparing.folder(run) / "upscaled" if variant == "hml" else room / "base"
    for name in ("plants", "stars"):
        text = room / f"{name}.txt"
        assert base.losses[name] == pytest.approx(packed_loss(room / "base", text), rel=1e-5)
        assert result.start.losses[name] == pytest.approx(packed_loss(start, text), rel=1e-5)
        assert result.losses[name] == pytest.approx(packed_loss(comparing.folder(run) / "trained", text), rel=1e-5)
    assert result.losses["plants"] < result.start.losses["plants"]
    assert [point.step for point in result.curve] == [0, STEPS // 2, STEPS]
    assert result.seconds > 0 and result.tokens == STEPS * TOKENS_PER_STEP
    assert base.tasks["piqa"] == accuracy(room / "base", room)
    assert result.tasks["piqa"] == accuracy(comparing.folder(run) / "trained", room)


def count(folder: Path) -> int:
    """The parameters of a model, without the statistics that its buffers hold."""
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_result_names_its_run_and_sizes(room, kept):
    comparing, base, results = kept
    (of_hml, hml), (_, full) = results["hml"], results["full"]
    rates = {"learning_rate": 1e-2, "value_learning_rate": 1e-1}
    assert (hml.variant, hml.rate, hml.seed, hml.control) == ("hml", rates, 0, None)
    assert (full.variant, full.rate, full.shuffled) == ("full", {}, None)
    assert (hml.starts_at_base, full.starts_at_base) == (True, None)
    assert not hml.starts_elsewhere and not full.starts_elsewhere and base.losses == full.start.losses
    assert hml.is_causal
    assert (base.variant, base.curve[0].step, len(base.curve)) == ("base", 0, 1)
    for run, result in results.values():
        assert result == read_result(comparing.folder(run)) and result.peak_memory_bytes > 10**7
        assert result.request == request_of(run, comparing.comparison)
    size = count(room / "base")
    assert hml.new_parameters == hml.trained_parameters == count(comparing.folder(of_hml) / "upscaled") - size > 0
    assert (full.new_parameters, full.trained_parameters) == (0, size)


MOC = {"memory_tokens": 16, "chapters": 4, "k": 2, "routing": "sequence"}
# Variants, and what is told of their results.
TOLD = {
    "a start elsewhere": (
        {"upscale": {"method": "solar"}},
        {"starts_at_base": False, "starts_elsewhere": True, "is_causal": True},
    ),
    "not compared with the base, not causal": (
        {"upscale": {"method": "moc", "options": MOC, "verify": False}},
        {"starts_at_base": None, "starts_elsewhere": True, "is_causal": False},
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_result_has_the_start_and_kind_of_its_model(room, kept, tmp_path, case):
    variant, told = TOLD[case]
    comparing = with_the_base_of(kept, SmallComparison(room, tmp_path, {"a": variant}, controls=False))
    result = comparing.measure(comparing.runs()[0])
    assert {key: getattr(result, key) for key in told} == told
    assert (result.start.losses["plants"] != kept[1].losses["plants"]) == (result.starts_at_base is False)


def test_shuffled_addresses_are_those_of_the_trained_model(room, kept, tmp_path):
    comparing, _, results = kept
    run, result = results["hml"]
    trained = comparing.folder(run) / "trained"
    shuffle(trained, tmp_path / "out", 0)
    for name in ("plants", "stars"):
        text = room / f"{name}.txt"
        assert result.shuffled[name] == pytest.approx(packed_loss(tmp_path / "out", text), rel=1e-5)
        assert result.saved[name] == pytest.approx(packed_loss(trained, text), rel=1e-5)
    assert result.shuffled["plants"] != result.saved["plants"]
    assert {path.name for path in comparing.folder(run).iterdir()} == {"upscaled", "trained", "shuffled"}


def test_run_begins_anew_and_leaves_one_file(room, kept, tmp_path):
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}}
    comparing = with_the_base_of(kept, SmallComparison(room, tmp_path, variants, controls=False, tasks=tasks_in(room)))
    (run,) = comparing.runs()
    (comparing.folder(run) / "upscaled").mkdir(parents=True)
    (comparing.folder(run) / "upscaled" / CONFIG_FILE).write_text("half of a model that an interrupted run has left")
    result = comparing.measure(run)
    assert result.shuffled is None and result.saved is None
    assert [path.name for path in comparing.folder(run).parent.iterdir()] == ["seed-0.json"]
    expected = kept[2]["hml"][1]
    assert [point.losses for point in result.curve] == [point.losses for point in expected.curve]
    assert result.tasks == expected.tasks


def test_texts_are_read_as_the_corpus_is(room, tmp_path):
    for name in ("plants", "stars", "corpus"):
        paths = [room / f"{name}.txt"] if name != "corpus" else sorted((room / "corpus").iterdir())
        row = {"body": "\n".join(path.read_text() for path in paths), "text": "none"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    domain, retention = ({name: str(tmp_path / f"{name}.jsonl")} for name in ("plants", "stars"))
    corpus = {"corpus": str(tmp_path / "corpus.jsonl"), "text_column": "body", "eval_steps": STEPS - 1}
    comparing = SmallComparison(room, tmp_path / "out", {"full": {}}, train=corpus, domain=domain, retention=retention)
    base = comparing.measure_base()
    assert base.losses["plants"] == pytest.approx(packed_loss(room / "base", room / "plants.txt"), rel=1e-5)
    result = comparing.measure(comparing.runs()[0])
    assert result.start.losses == base.losses
    # The end, though eval_steps does not divide the steps.
    assert [point.step for point in result.curve] == [0, STEPS - 1, STEPS]


def test_only_tasks_are_measured_without_texts(room, tmp_path):
    changes = {"domain": {}, "retention": {}, "validation": {}, "tasks": tasks_in(room), "controls": False}
    comparing = SmallComparison(room, tmp_path, {"full": {}}, **changes)
    base, result = comparing.measure_base(), comparing.measure(comparing.runs()[0])
    assert base.losses == {} and result.curve == [] and set(result.tasks) == {"piqa"}


ALL_CONTROLS = ["one-row", "random-slots", "frozen-addresses", "shuffled-addresses"]
METHODS = {
    "midus-hml": HEADWISE,
    "midus-pkm": {"method": "midus-pkm", "num_new_layers": 1, "options": {"n": 4, "k": 2}},
    "moc": {"method": "moc", "options": {"layers": 1, "memory_tokens": 12, "chapters": 6, "k": 2, "chunk_size": 4}},
}


@pytest.mark.parametrize(
    ("train", "missing"),
    [({}, []), ({"trainable": "all"}, ["frozen-addresses"]), ({"adapters": {"r": 4}}, ["frozen-addresses"])],
)
def test_null_controls_are_planned_as_training_allows(room, tmp_path, train, missing):
    """If the base trains as well, rows that are trained alone would lack more than their addresses."""
    (variant,) = SmallComparison(room, tmp_path, {"a": {"upscale": METHODS["moc"], "train": train}}).variants
    assert list(variant.controls) == [name for name in ALL_CONTROLS if name not in missing]
    assert [one.name for one in control_variants(variant, {})] == [f"a+{name}" for name in variant.controls][:-1]


def test_null_controls_are_of_the_added_memory(room, tmp_path):
    upscale(base=room / "base", output=tmp_path / "base", **METHODS["midus-pkm"])
    any_type("gemma").save_pretrained(tmp_path / "other")
    for base in (tmp_path / "base", tmp_path / "other"):  # with memory; of a type that is proven in each run
        options = {"a": {"upscale": METHODS["moc"]}, "b": {"upscale": {"method": "solar"}}}
        moc, solar = SmallComparison(room, tmp_path / "out", options, base=str(base)).variants
        assert {"memory_tokens", "chapters"} < set(moc.controls["one-row"].options) and solar.controls == {}


# Every null control, of memories that are inserted and of one that is attached.
@pytest.mark.parametrize(
    ("method", "name"), zip(METHODS, ["one-row", "frozen-addresses", "random-slots"], strict=True)
)
def test_null_control_is_upscaled_and_trained(room, kept, tmp_path, method, name):
    comparing = SmallComparison(room, tmp_path / "out", {method: {"upscale": METHODS[method]}}, train={"max_steps": 1})
    controls = control_variants(comparing.variants[0], {"learning_rate": 5e-3})
    control = {one.control: one for one in controls}[name]
    with_the_base_of(kept, comparing)
    run = Run(control, {"learning_rate": 5e-3}, 0)
    result = comparing.measure(run, keep=True)
    assert (result.variant, result.control, result.control_of) == (f"{method}+{name}", name, method)
    assert result.rate == {"learning_rate": 5e-3} and result.starts_at_base is True and result.shuffled is None
    new = count(comparing.folder(run) / "upscaled") - count(room / "base")
    assert result.new_parameters == new
    if name == "frozen-addresses":
        assert control.upscale == comparing.variants[0].upscale and 0 < result.trained_parameters < new
    else:
        assert 0 < result.trained_parameters <= new
        assert (new < comparing.variants[0].new_parameters) == (name == "one-row")
