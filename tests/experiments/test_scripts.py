"""The scripts of experiments on a tiny model: several texts in turn, and a training loop of one's own."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
from compare.small_comparison import write_room
from pairs import by_default
from topics.tiny_bert import save_tiny_bert
from transformers import AutoTokenizer

from experiments import own_training, stages
from experiments.facts import __main__ as facts

WORDS = {"greek": ("alpha", "beta", "gamma", "delta"), "numbers": ("one", "two", "three", "four")}
ENGRAM = '{method: engram, options: {table: exact, corpus: "{corpus}", width: 8, layers: [0], compress: false}}'
WAYS = {
    "in order": [],
    "replay": ["--replay", "0.5"],
    "routed": ["--routed", "BERT"],
    "a memory each": ["--upscale", ENGRAM, "--protect-earlier"],
}


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A base, an embedding model, and for each of two stages a corpus, a validation text and a text, of some documents each."""
    folder, choice = write_room(tmp_path_factory.mktemp("room")), random.Random(0)
    for stage, words in WORDS.items():
        (folder / stage).mkdir()
        for part, documents in (("corpus", 12), ("validation", 3), ("text", 3)):
            rows = [{"text": " ".join(choice.choice(words) for _ in range(20))} for _ in range(documents)]
            path = folder / stage / f"{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tiny_bert(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def learned(room, tmp_path_factory):
    """Return a function that learns both stages in one of the ways, and returns the lines of the result."""
    done: dict[str, list] = {}

    def learn(way: str, capsys, monkeypatch) -> list[dict]:
        if way not in done:
            words = [str(room / name) for name in ("base", *WORDS)] + ["--retention", str(room / "stars.txt")]
            words += ["--output", str(tmp_path_factory.mktemp("out") / "new"), "--train", "bf16=false"]
            words += "learning_rate=1e-2 max_steps=2 sequence_length=32 per_device_train_batch_size=2".split()
            words += [str(room / "bert") if word == "BERT" else word for word in WAYS[way]]
            monkeypatch.setattr(sys, "argv", ["stages", *words])
            capsys.readouterr()
            stages.main()
            done[way] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return done[way]

    return learn


@pytest.mark.parametrize("way", by_default(["routed", "a memory each"], WAYS))
def test_stages_are_learned_in_every_way_and_measured_after_each(learned, way, capsys, monkeypatch):
    base, *after, end = learned(way, capsys, monkeypatch)
    assert [base["after"], *(line["after"] for line in after)] == ["base", *WORDS]
    assert [line["tokens"] for line in after] == [128, 128] and end["gains"]["greek"] > 0
    assert after[0]["losses"]["greek"] < base["losses"]["greek"]
    assert end["backward_transfer"] == after[0]["losses"]["greek"] - after[1]["losses"]["greek"]
    if way == "replay":
        without = learned("in order", capsys, monkeypatch)
        assert after[0] == without[1] and after[1]["losses"]["greek"] < without[2]["losses"]["greek"]
    if way == "routed":
        assert end["at_their_stage"]["greek"] == 1.0
    if way == "a memory each":  # what the second stage learned reads no n-gram of the first one's corpus
        assert end["backward_transfer"] == 0.0 and after[0]["losses"]["numbers"] == base["losses"]["numbers"]


@pytest.mark.parametrize(("share", "counts"), [(0.2, [20, 82]), (0.5, [50, 52])])
def test_a_share_of_tokens_comes_from_earlier_corpora(room, tmp_path, share, counts):
    tokenizer = AutoTokenizer.from_pretrained(room / "base")
    corpora = [["a" * 7] * 3, ["b" * 9] * 40]
    assert stages.write_replayed(tmp_path / "out.jsonl", corpora, share, 100, tokenizer, 0) == counts
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    # With the token that training puts behind each document.
    assert [sum(len(text) + 1 for text in texts if text[0] == letter) for letter in "ab"] == counts


def test_a_loop_of_ones_own_is_measured(room, tmp_path, capsys, monkeypatch):
    words = [str(room / "base"), str(room / "greek"), "--output", str(tmp_path / "out"), "--rate", "0.5"]
    monkeypatch.setattr(sys, "argv", ["own_training", *words, "--steps", "4", "--sequence-length", "32"])
    own_training.main()
    result = json.loads(capsys.readouterr().out)
    assert result["after"]["greek"] < result["before"]["greek"] and result["tokens"] == 4 * 4 * 32


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("stages", "BASE ROOM/greek ROOM/absent --output ROOM/new --train max_steps=1", "no file .*absent/corpus.jsonl; expected"),
        ("stages", "ROOM/absent ROOM/greek --output ROOM/new --train max_steps=1", "base is '.*absent', which does not exist; exp"),
        ("stages", "BASE ROOM/greek --output ROOM/greek --train max_steps=1", "--output is '.*greek', which exists; expected a new"),
        ("stages", "BASE ROOM/greek --output ROOM/new --retention x.txt --train max_steps=1", "--retention is 'x.txt', which does"),
        ("own_training", "BASE ROOM/absent --output ROOM/new", "no file .*absent/corpus.jsonl; expected the folder of a stage"),
        ("facts", "ROOM/absent", "model is '.*absent', which does not exist; expected the folder of a model"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_in_a_line(script, words, message, room, capsys, monkeypatch):
    line = words.replace("BASE", str(room / "base")).replace("ROOM", str(room)).split()
    monkeypatch.setattr(sys, "argv", [script, *line])
    with pytest.raises(SystemExit, match="2"):
        {"stages": stages, "own_training": own_training, "facts": facts}[script].main()
    assert re.search(f"error: {message}", capsys.readouterr().err)
