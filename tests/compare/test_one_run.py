"""One run from upscaling to its result: what is measured is what the commands measure, and one file stays."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compare.small_comparison import HEADWISE, STEPS, SmallComparison, write_room
from evaluation.questions import write_questions
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.compare.plan import Run, TaskOptions, control_variants
from midus_hf.compare.run import build_request, code_version, find_stages, hash_base, read_result
from midus_hf.config.errors import RequestError
from midus_hf.evaluation.evaluate import evaluate
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
    return {"names": ["piqa"], "limit": 2, "data": str(room / "questions")}


def packed_loss(folder: Path, text: Path) -> float:
    """Return the loss of a text as the Trainer measures it: sequences of 32 tokens, the first of which is not predicted."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = [*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id]
    sequences = [torch.tensor([ids[begin : begin + 32]]) for begin in range(0, len(ids) - 1, 32)]
    counts = [one.shape[1] - 1 for one in sequences]
    with torch.no_grad():
        losses = [model.eval()(input_ids=one, labels=one).loss.item() for one in sequences]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def accuracy(model: Path, room: Path) -> dict[str, float]:
    return evaluate([str(model)], TaskOptions(**tasks_in(room)).settings())["models"][0]["tasks"]["piqa"]


def count(folder: Path) -> int:
    """The parameters of a model, without the statistics that its buffers hold."""
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


@pytest.fixture(scope="module")
def kept(room, tmp_path_factory):
    """Return a comparison whose models stay, with the base's result and theirs."""
    moc = {"memory_tokens": 16, "chapters": 4, "k": 2, "routing": "sequence"}
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}, "full": {"train": {"learning_rate": 1e-3}}}
    variants |= {
        "measured": {"upscale": HEADWISE, "rates": [None]},
        "moc": {"upscale": {"method": "moc", "options": moc, "verify": False}},
        "solar": {"upscale": {"method": "solar"}},
    }
    comparing = SmallComparison(room, tmp_path_factory.mktemp("kept"), variants, tasks=tasks_in(room))
    base = comparing.measure_base()
    return comparing, base, {run.variant.name: (run, comparing.measure(run, keep=True)) for run in comparing.runs()}


@pytest.mark.parametrize("variant", ["hml", "full"])
def test_curve_ends_are_losses_of_packed_sequences(room, kept, tmp_path, variant):
    comparing, base, results = kept
    run, result = results[variant]
    trained, start = comparing.folder(run) / "trained", room / "base"
    measured = [(base.losses, start), (result.losses, trained)]
    if variant == "hml":
        start = comparing.folder(run) / "upscaled"
        shuffle(trained, tmp_path / "shuffled", 0)
        measured += [(result.saved, trained), (result.shuffled, tmp_path / "shuffled")]
        assert result.shuffled["plants"] != result.saved["plants"]
    for losses, model in (*measured, (result.start.losses, start)):
        for name in ("plants", "stars"):
            assert losses[name] == pytest.approx(packed_loss(model, room / f"{name}.txt"), rel=1e-5)
    assert result.losses["plants"] < result.start.losses["plants"]
    assert [point.step for point in result.curve] == [0, STEPS // 2, STEPS]
    assert result.seconds > 0
    assert result.tokens == STEPS * 64
    assert result.peak_memory_bytes > 10**7
    assert (base.tasks["piqa"], result.tasks["piqa"]) == (accuracy(room / "base", room), accuracy(trained, room))
    assert result == read_result(comparing.folder(run))
    assert result.request == build_request(run, comparing.comparison)


def test_result_names_its_run_sizes_and_origin(room, kept):
    comparing, base, results = kept
    (of_hml, hml), (_, full) = results["hml"], results["full"]
    rates = {"learning_rate": 1e-2, "value_learning_rate": 1e-1}
    assert (hml.variant, hml.rate, hml.seed, hml.control) == ("hml", rates, 0, None)
    assert (full.variant, full.rate, full.shuffled) == ("full", {}, None)
    measured = results["measured"][1]
    assert measured.rate == {"learning_rate": None}
    assert {*measured.measured_rates} == {*rates}
    assert hml.measured_rates == {}
    told = {name: (one.starts_at_base, one.starts_elsewhere, one.is_causal) for name, (_, one) in results.items()}
    expected = {"hml": (True, False, True), "measured": (True, False, True), "full": (None, False, True)}
    assert told == {**expected, "moc": (None, True, False), "solar": (False, True, True)}
    assert [one.start.losses == base.losses for _, one in results.values()] == [True, True, True, True, False]
    assert (base.variant, base.curve[0].step, len(base.curve)) == ("base", 0, 1)
    size = count(room / "base")
    assert hml.new_parameters == hml.trained_parameters == count(comparing.folder(of_hml) / "upscaled") - size > 0
    assert (full.new_parameters, full.trained_parameters) == (0, size)
    assert base.origin == {**comparing.digests_for(comparing.variants[1]), "code": code_version()}


def test_run_begins_anew_and_leaves_one_file(room, kept, tmp_path):
    variants = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}}
    comparing = SmallComparison(room, tmp_path, variants, controls=False, tasks=tasks_in(room))
    (run,) = comparing.runs()
    (comparing.folder(run) / "upscaled").mkdir(parents=True)
    (comparing.folder(run) / "upscaled" / CONFIG_FILE).write_text("half of a model that an interrupted run has left")
    result, expected = comparing.measure(run), kept[2]["hml"][1]
    assert result.shuffled is None
    assert result.saved is None
    assert [path.name for path in comparing.folder(run).parent.iterdir()] == ["seed-0.json"]
    assert (result.curve, result.tasks) == (expected.curve, expected.tasks)


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
    assert base.losses == {}
    assert result.curve == []
    assert set(result.tasks) == {"piqa"}


def test_run_without_numbers_or_steps_is_no_result(room, tmp_path, monkeypatch):
    comparing = SmallComparison(room, tmp_path, {"full": {}}, train={"per_device_train_batch_size": 10**4})
    with pytest.raises(RequestError, match=r"after 0 of 4 steps.*expected more text, or a smaller per_device"):
        comparing.measure(comparing.runs()[0])
    monkeypatch.setattr("midus_hf.compare.run._measure_texts", lambda *_: {"plants": math.nan})
    with pytest.raises(RequestError, match=r"losses ended at .*nan.*; expected finite numbers. Lower the rate"):
        comparing.measure_base()
    assert not list(tmp_path.rglob("*/seed-0.json"))
    assert not list(tmp_path.rglob("base.json"))


def test_digests_cover_what_a_run_reads_once(room, tmp_path, monkeypatch):
    base, before = room / "base", hash_base(str(room / "base"))
    (base / "notes.txt").write_text("not read")
    assert hash_base(str(base)) == before
    for name in ("config.json", "tokenizer_config.json"):
        usual = (base / name).read_text()
        (base / name).write_text(usual + " ")
        assert hash_base(str(base)) != before
        (base / name).write_text(usual)
    read = []
    monkeypatch.setattr("midus_hf.compare.run.hash_text", lambda path: read.append(path) or path)
    variants = {"a": {}, "b": {"train": {"corpus": str(room / "corpus" / "1.txt")}}}
    comparing = SmallComparison(room, tmp_path, variants, tasks=tasks_in(room))
    first, second = map(comparing.digests_for, comparing.variants)
    assert first["data"] != second["data"]
    assert first["base"] == second["base"] == before
    assert comparing.digests_for(find_stages(comparing.comparison, [])[0][0].variant) == first
    texts = (room / name for name in ("corpus", "corpus/1.txt", "plants.txt", "stars.txt", "herbs.txt", "questions"))
    assert sorted(read) == sorted(map(str, texts))


ALL_CONTROLS = ["one-row", "random-slots", "frozen-addresses", "shuffled-addresses"]
METHODS = {
    "midus-hml": HEADWISE,
    "midus-pkm": {"method": "midus-pkm", "num_new_layers": 1, "options": {"n": 4, "k": 2}},
    "moc": {"method": "moc", "options": {"layers": 1, "memory_tokens": 12, "chapters": 6, "k": 2, "chunk_size": 4}},
}


def test_null_controls_are_of_the_added_memory(room, tmp_path):
    """If the base trains as well, rows trained without it would lack more than their addresses."""
    upscale(base=room / "base", output=tmp_path / "base", **METHODS["midus-pkm"])
    any_type("gemma").save_pretrained(tmp_path / "other")
    options = {"a": {"upscale": METHODS["moc"]}, "solar": {"upscale": {"method": "solar"}}}
    options |= {"all": {**options["a"], "train": {"trainable": "all"}}}
    options |= {"lora": {**options["a"], "train": {"adapters": {"r": 4}}}}
    for base in (room / "base", tmp_path / "base", tmp_path / "other"):  # with memory; of a type that is proven here
        moc, solar, *wider = SmallComparison(room, tmp_path / "out", options, base=str(base)).variants
        assert list(moc.controls) == ALL_CONTROLS
        assert solar.controls == {}
        assert {"memory_tokens", "chapters"} < set(moc.controls["one-row"].options)
        controls = [(one.name, one.upscale["options"]["layers"]) for one in control_variants(moc, {})]
        assert controls == [(f"a+{name}", 1) for name in ALL_CONTROLS[:-1]]
        assert [[*one.controls] for one in wider] == [[*ALL_CONTROLS[:2], ALL_CONTROLS[3]]] * 2


# Every null control, of memories that are inserted and of one that is attached.
@pytest.mark.parametrize(
    ("method", "name"), zip(METHODS, ["one-row", "frozen-addresses", "random-slots"], strict=True)
)
def test_null_control_is_upscaled_and_trained(room, tmp_path, method, name):
    comparing = SmallComparison(room, tmp_path / "out", {method: {"upscale": METHODS[method]}}, train={"max_steps": 1})
    (variant,), rate = comparing.variants, {"learning_rate": 5e-3}
    control = {one.control: one for one in control_variants(variant, rate)}[name]
    run = Run(control, rate, 0)
    result = comparing.measure(run, keep=True)
    assert (result.variant, result.control, result.control_of) == (f"{method}+{name}", name, method)
    assert result.rate == rate
    assert result.starts_at_base is True
    assert result.shuffled is None
    new = count(comparing.folder(run) / "upscaled") - count(room / "base")
    assert result.new_parameters == new
    is_frozen = name == "frozen-addresses"
    assert (control.upscale == variant.upscale) == is_frozen
    assert 0 < result.trained_parameters <= new - is_frozen
    assert (new < variant.new_parameters) == (name == "one-row")
