"""Stages: several corpora one after the other, by one model or by one for each, measured document by document after each."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from compare.small_comparison import HEADWISE, Comparing, write_room
from topics.tiny_bert import save_tiny_bert
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.compare.making import made_together
from midus_hf.compare.options import Comparison
from midus_hf.compare.rivals import StageFinder, write_replayed
from midus_hf.compare.runs import check
from midus_hf.compare.variants import with_corpora
from midus_hf.config.yaml_options import from_mapping
from midus_hf.evaluation.text_rows import read_rows, text_rows
from midus_hf.topics.corpus import read_corpus
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.run import train

WORDS = {"greek": ("alpha", "beta", "gamma", "delta"), "numbers": ("one", "two", "three", "four")}
ENGRAM = {
    "method": "engram",
    "options": {"table": "exact", "corpus": "{corpus}", "width": 8, "layers": [0], "compress": False},
}


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Write a base, and for each of two stages a corpus, a validation text and a text, of some documents each."""
    folder = write_room(tmp_path_factory.mktemp("room"))
    choice = random.Random(0)
    for stage, words in WORDS.items():
        for part, documents in (("corpus", 12), ("validation", 3), ("text", 3)):
            rows = [{"text": " ".join(choice.choice(words) for _ in range(20))} for _ in range(documents)]
            path = folder / f"{stage}-{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tiny_bert(folder / "bert")
    return folder


def staged(room: Path, output: Path, variants: dict[str, Any], **changes: Any) -> Comparing:
    """Return a comparison that learns the two stages, in two steps each."""
    parts = ("corpus", "validation", "text")
    stages = {stage: {part: str(room / f"{stage}-{part}.jsonl") for part in parts} for stage in WORDS}
    train = {"max_steps": 2, **changes.pop("train", {})}
    return Comparing(room, output, variants, **{"train": train, "controls": False, "stages": stages, **changes})


def measured(room: Path, output: Path, options: dict[str, Any], **changes: Any):
    """Check all, do the first run of a variant `a`, and return the comparison, the result of the base and that of the run."""
    comparing = staged(room, output, {"a": options}, **changes)
    check(comparing.comparison, comparing.variants)
    base = comparing.measure_base()
    return comparing, base, comparing.measure_and_keep(comparing.runs()[0])


def loss(model: Path | str, text: Path) -> float:
    """Return the loss of a text whose documents are measured one by one, in nats per token."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    return read_rows(
        loaded, text_rows("text", read_corpus(str(text))["text"][:], tokenizer, loaded.config, sequence_length=32)
    ).mean


def by_hand(comparing: Comparing, stage: int, model: Path, output: Path) -> Path:
    """Train one stage as `midus train` would, and return the folder of the model."""
    run = comparing.runs()[0]
    train(from_mapping(TrainArguments, run.stage_keys(comparing.comparison, stage, model, output)))
    return output


def test_a_model_learns_the_stages_in_order_and_all_texts_are_measured_after_each(room, tmp_path):
    comparing, base, result = measured(room, tmp_path / "out", {"rates": [1e-2]})
    first = by_hand(comparing, 0, room / "base", tmp_path / "first")
    second = by_hand(comparing, 1, first, tmp_path / "second")
    texts = {"greek": room / "greek-text.jsonl", "numbers": room / "numbers-text.jsonl", "stars": room / "stars.txt"}
    for name, path in texts.items():
        expected = [pytest.approx(loss(model, path), rel=1e-12) for model in (room / "base", first, second)]
        assert [point.losses[name] for point in result.curve] == expected and base.losses[name] == expected[0]
    validation = room / "numbers-validation.jsonl"
    assert result.losses["numbers_validation"] == pytest.approx(loss(second, validation), rel=1e-12)
    assert "numbers_validation" not in result.curve[1].losses
    assert [point.step for point in result.curve] == [0, 1, 2] and result.tokens == 256
    kept = AutoModelForCausalLM.from_pretrained(comparing.folder(comparing.runs()[0]) / "2-numbers" / "trained")
    for name, tensor in AutoModelForCausalLM.from_pretrained(second).state_dict().items():
        assert torch.equal(kept.state_dict()[name], tensor), name
    assert result.losses["greek"] < base.losses["greek"]


def test_a_memory_is_added_once_and_learns_all_stages(room, tmp_path):
    comparing, base, result = measured(room, tmp_path / "out", {"upscale": HEADWISE})
    assert result.start.losses == base.losses and result.starts_at_base is True
    assert result.trained_parameters == result.new_parameters == comparing.variants[0].new_parameters


@pytest.mark.parametrize(
    ("starts", "together"), [([True, True], True), ([True, None], None), ([True, None, False], False)], ids=str
)
def test_what_was_not_compared_with_the_base_is_not_said_to_differ_from_it(starts, together):
    made = [{"new_parameters": 2, "starts_at_base": start, "is_causal": start is not None} for start in starts]
    expected = {"new_parameters": 2 * len(starts), "starts_at_base": together, "is_causal": None not in starts}
    assert made_together(made) == expected


def test_adapters_are_merged_after_each_stage(room, tmp_path):
    pytest.importorskip("peft")
    comparing, _, result = measured(room, tmp_path / "out", {"train": {"adapters": {"r": 2}, "learning_rate": 1e-2}})
    folder = comparing.folder(comparing.runs()[0])
    assert sorted(path.name for path in folder.iterdir()) == ["2-numbers"]
    first = by_hand(comparing, 0, room / "base", tmp_path / "first")
    assert result.curve[1].losses["greek"] == pytest.approx(loss(first, room / "greek-text.jsonl"), rel=1e-12)


def test_a_memory_of_each_stage_is_added_before_it_and_trains_alone(room, tmp_path):
    options = {"upscale": ENGRAM, "upscale_each": True, "train": {"protect": "{earlier}", "learning_rate": 1e-2}}
    comparing, base, result = measured(room, tmp_path / "out", options)
    model = comparing.folder(comparing.runs()[0]) / "2-numbers" / "trained"
    entries = json.loads((model / "config.json").read_text())["memory"]
    assert len(entries) == 2 and result.starts_at_base is True
    tensors = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(room / "base").state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    # What the second stage learned reads no n-gram of the first one's corpus.
    assert result.curve[1].losses["greek"] < base.losses["greek"]
    assert result.is_certified and result.new_parameters > comparing.variants[0].new_parameters


@pytest.mark.parametrize(
    ("earlier", "protected"), [([], ["notes"]), (["first", "second"], ["notes", "first", "second"])], ids=str
)
def test_corpora_of_earlier_stages_are_protected_beside_other_texts(earlier, protected):
    keys = {"protect": ["notes", "{earlier}"], "eval_text": ["{corpus}"]}
    assert with_corpora(keys, "third", earlier) == {"protect": protected, "eval_text": ["third"]}


def test_each_stage_has_a_model_of_its_own_and_a_document_the_nearest(room, tmp_path, monkeypatch):
    save_tiny_bert(tmp_path / "bert")
    monkeypatch.setattr("midus_hf.compare.rivals.StageFinder", lambda *_: Nearest())
    options = {"one_per_stage": True, "rates": [1e-2]}
    comparing, base, result = measured(room, tmp_path / "out", options, embedding_model=str(tmp_path / "bert"))
    models = [by_hand(comparing, stage, room / "base", tmp_path / str(stage)) for stage in (0, 1)]
    greek, numbers, stars = room / "greek-text.jsonl", room / "numbers-text.jsonl", room / "stars.txt"
    after_first, after_second = (point.losses for point in result.curve[1:])
    assert after_first["greek"] == after_second["greek"] == pytest.approx(loss(models[0], greek), rel=1e-12)
    assert after_first["numbers"] == base.losses["numbers"]
    assert after_second["numbers"] == pytest.approx(loss(models[1], numbers), rel=1e-12)
    assert after_second["stars"] == base.losses["stars"] == pytest.approx(loss(room / "base", stars), rel=1e-12)
    assert result.routed == {"greek": 1.0, "numbers": 1.0}
    assert list(comparing.folder(comparing.runs()[0]).iterdir()) == []


class Nearest:
    """What finds a document's stage by its first word, in place of embeddings."""

    def embed(self, documents) -> list[int]:
        first = [document.split()[0] for document in documents]
        return [next((stage for stage, words in enumerate(WORDS.values()) if word in words), -1) for word in first]

    def stages_of(self, embeddings: list[int], num_stages: int) -> list[int]:
        return [stage if stage < num_stages else -1 for stage in embeddings]


class CountingEmbedder:
    """Embeds a text as the numbers of its words that each stage has, and of others."""

    def __init__(self, model: str):
        self.model = model

    def embed(self, texts) -> torch.Tensor:
        kinds = [*WORDS.values()]
        rows = [[sum(word in words for word in text.split()) for words in kinds] for text in texts]
        rows = [[*row, len(text.split()) - sum(row)] for row, text in zip(rows, texts, strict=True)]
        return torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


def test_the_nearest_stage_is_that_of_the_nearest_centroid_and_far_documents_have_none(monkeypatch):
    monkeypatch.setattr("midus_hf.compare.rivals.TextEmbedder", CountingEmbedder)
    texts = {"greek": ["alpha beta gamma delta alpha beta"] * 3, "numbers": ["one two three four one two"] * 3}
    finder = StageFinder("model", texts, texts)
    rows = finder.embed(["alpha beta gamma one", "one two", "a star is far away"])
    assert finder.stages_of(finder.embed(["delta", "one two", "a star is far away"]), 2) == [0, 1, -1]
    assert finder.stages_of(rows, 1)[1:] == [-1, -1]


@pytest.mark.parametrize(("share", "counts"), [(0.2, [20, 82]), (0.5, [50, 52])])
def test_a_share_of_tokens_comes_from_earlier_corpora(room, tmp_path, share, counts):
    tokenizer = AutoTokenizer.from_pretrained(room / "base")
    corpora = [["a" * 7] * 3, ["b" * 9] * 40]
    assert write_replayed(tmp_path / "out.jsonl", corpora, share, 100, tokenizer, 0) == counts
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    # With the token that training puts behind each document.
    tokens = [sum(len(text) + 1 for text in texts if text[0] == letter) for letter in "ab"]
    assert tokens == counts and sum(counts) == 102


def test_earlier_corpora_are_replayed_evenly(room, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(room / "base")
    corpora = [["a" * 7], ["b" * 7], ["c" * 7]]
    assert write_replayed(tmp_path / "out.jsonl", corpora, 0.5, 160, tokenizer, 0) == [40, 40, 83]


def test_a_stage_with_replay_trains_on_as_many_tokens(room, tmp_path):
    _, _, result = measured(room, tmp_path / "out", {"replay": 0.5, "rates": [1e-2]})
    _, _, without = measured(room, tmp_path / "without", {"rates": [1e-2]})
    assert result.tokens == without.tokens and result.curve[1].losses == without.curve[1].losses
    assert result.losses["greek"] < without.losses["greek"]


@pytest.mark.parametrize("apart", [False, True], ids=["in order", "one per stage"])
def test_a_function_teaches_each_stage_and_several_models_are_never_certified(room, tmp_path, monkeypatch, apart):
    monkeypatch.setattr("midus_hf.compare.rivals.StageFinder", lambda *_: Nearest())
    (tmp_path / "mine.py").write_text(
        "import shutil\n"
        "def teach(base, corpus, output, seed, keys):\n"
        "    shutil.copytree(base, output, dirs_exist_ok=True)\n"
        "    open(output + '/certificate.json', 'w').close()\n"
        "    with open(corpus) as file:\n"
        "        return {'trained_parameters': 1, 'tokens': len(file.readlines()) + (keys['corpus'] == corpus)}\n"
    )
    options = {"function": f"{tmp_path / 'mine.py'}:teach", "one_per_stage": apart}
    changes = {"embedding_model": str(room / "bert")} if apart else {}
    _, base, result = measured(room, tmp_path / "out", options, **changes)
    assert result.tokens == 26 and result.curve[-1].losses == base.losses
    assert result.is_certified is not apart


GIVEN = {
    "base": "base",
    "output_dir": "out",
    "variants": {"a": {}},
    "train": {"max_steps": 2},
    "stages": {name: {"corpus": f"{name}c", "validation": f"{name}v", "text": f"{name}t"} for name in "xy"},
    "controls": False,
}
BESIDE = "is given, and stages are too, which have no"
REFUSED = {
    "a domain": ({"domain": {"d": "d"}}, f"domain {BESIDE} domain beside them. Leave domain out."),
    "validation": ({"validation": {"d": "d"}}, f"validation {BESIDE} validation beside them."),
    "tasks": ({"tasks": {"names": ["piqa"]}}, f"tasks {BESIDE} tasks beside them."),
    "controls": ({"controls": True}, f"controls {BESIDE} controls beside them. Set controls: false."),
    "fine-tuning": ({"fine_tune": {}}, f"fine_tune {BESIDE} fine_tune beside them."),
    "one stage": ({"stages": {"x": GIVEN["stages"]["x"]}}, "stages has one stage; expected two or more."),
    "a stage called as a text": ({"retention": {"x": "x"}}, "domain and retention both have a text 'x'; expected a name of its own"),
    "a stage's name": ({"stages": {"x/y": GIVEN["stages"]["x"], "z": GIVEN["stages"]["y"]}}, "stages has 'x/y'; expected letters"),
    "a part of a stage": ({"stages": {"x": {"corpus": "c"}}}, "config has no 'stages.x.validation'"),
    "a share": ({"variants": {"a": {"replay": 1.0}}}, "replay is 1.0; expected a share above 0 and below 1."),
    "one for each with replay": (
        {"variants": {"a": {"one_per_stage": True, "replay": 0.5}}}, "one_per_stage trains each stage from the base, and replay or"
    ),
    "each without a method": ({"variants": {"a": {"upscale_each": True}}}, "upscale_each is true, and upscale is not given;"),
    "no embedding model": (
        {"variants": {"a": {"one_per_stage": True}}}, "variants.a has one_per_stage, which needs embedding_model; give a model that"
    ),
    "an embedding model for nothing": ({"embedding_model": "m"}, "embedding_model is given, and no variant has one_per_stage, which"),
    "replay without stages": (
        {"stages": {}, "domain": {"d": "d"}, "variants": {"a": {"replay": 0.5}}}, "variants.a has replay, and there are no"
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_what_stages_cannot_have_is_refused(refused):
    changes, message = REFUSED[refused]
    with pytest.raises(ValueError) as refusal:
        from_mapping(Comparison, {**GIVEN, **changes})
    assert str(refusal.value).startswith(message), refusal.value


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"train": {"corpus": "c"}}, "train has 'corpus', which the comparison sets for each run; leave it out."),
        ({"train": {"path_column": "p"}}, {}, "variants.a has path_column, or no max_steps; expected"),
        ({}, {"train": {"max_steps": -1, "num_train_epochs": 1}}, "variants.a has path_column, or no max_steps; expected"),
        ({"replay": 0.5, "function": "mine.py:teach"}, {}, "function is 'mine.py:teach', and upscale or replay is given too;"),
    ],
    ids=["a corpus", "paths", "no steps", "a function with replay"],
)  # fmt: skip
def test_keys_that_stages_cannot_have_are_refused(room, tmp_path, monkeypatch, options, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def teach(): pass")
    with pytest.raises(ValueError) as refusal:
        comparing = staged(room, tmp_path / "out", {"a": options}, **changes)
        check(comparing.comparison, comparing.variants)
    assert str(refusal.value).startswith(message), refusal.value


def test_an_embedding_model_that_is_not_there_is_refused_before_anything_runs(room, tmp_path):
    comparing = staged(
        room, tmp_path / "out", {"a": {"one_per_stage": True}}, embedding_model=str(tmp_path / "absent")
    )
    with pytest.raises(ValueError, match=r"embedding_model is '.*absent'"):
        check(comparing.comparison, comparing.variants)


@pytest.mark.parametrize("part", ["text", "validation"])
def test_a_text_of_a_stage_that_another_stage_trains_on_is_refused(room, tmp_path, part):
    parts = {part: str(room / f"greek-{part}.jsonl") for part in ("corpus", "validation", "text")}
    other = {part: str(room / f"numbers-{part}.jsonl") for part in parts}
    stages = {"greek": parts, "numbers": {**other, part: parts["corpus"]}}
    comparing = staged(room, tmp_path / "out", {"a": {}}, stages=stages)
    with pytest.raises(ValueError, match=rf"^stages\.numbers\.{part} is '.*greek-corpus\.jsonl', which a trains on"):
        check(comparing.comparison, comparing.variants)
