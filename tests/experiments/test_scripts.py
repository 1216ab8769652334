"""The scripts of experiments on a tiny model: several texts in turn, a training loop of one's own, and the judge of facts."""

import argparse
import io
import json
import random
import re
import sys
from pathlib import Path

import pytest
from compare.small_comparison import write_room
from evaluation.byte_models import save_byte_model
from pairs import by_default
from topics.tiny_bert import save_tiny_bert
from transformers import AutoTokenizer

from experiments import facts, own_training, stages
from upscalers import upscale

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


def test_entries_are_written_to_a_folder_that_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ABOUT", {"elements": lambda: ([{"name": "gold", "text": "Au"}], {})})
    monkeypatch.setattr(sys, "argv", ["facts", "--write", str(tmp_path / "new" / "folder")])
    facts.main()
    assert json.loads((tmp_path / "new" / "folder" / "elements.jsonl").read_text()) == {"name": "gold", "text": "Au"}


def test_every_entry_states_what_is_asked_of_it():
    entries = facts.entries_of_elements()
    assert [each["number"] for each in entries] == list(range(1, 119))
    assert all(str(each["number"]) in each["text"] and each["symbol"] in each["text"] for each in entries)
    countries = facts.entries_of_countries()
    assert len(countries) == 60 and all(each["text"].count("\n") == 4 for each in countries)
    products = facts.entries_of_products()
    assert len({each["port"] for each in products}) == len({each["name"] for each in products}) == 20
    assert all(each["text"].count(str(each["port"])) == 2 for each in products)


@pytest.mark.parametrize(
    ("is_right", "answers"),
    [
        (facts.first_number(11), {" 11.\n": True, " the 11th of 12": True, " 12, not 11": False, " unknown": False}),
        (facts.first_number(22.99, 0.1), {" 22.9 g": True, " 23": True, " 24.3": False}),
        (facts.first_word("Na"), {" Na.": True, ": Na": True, " na": False, " NaCl": False, "": False}),
        (facts.begins_with([".af", "93"]), {" .af": True, " 93 and": True, " 930": False, " of .af": False}),
    ],
    ids=["number", "weight", "symbol", "value"],
)
def test_right_answers(is_right, answers):
    assert {answer: is_right(answer) for answer in answers} == answers


def test_a_model_is_compared_with_its_base(tmp_path, monkeypatch, capsys):
    save_byte_model("llama", tmp_path / "base", max_position_embeddings=2048)
    few = facts.entries_of_elements()[:5]
    rows = [{key: each[key] for key in ("name", "text")} for each in few]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"corpus": str(tmp_path / "few.jsonl")}
    upscale(base=tmp_path / "base", method="packs", output=tmp_path / "model", options=options, verify=False)
    monkeypatch.setattr(facts, "entries_of_elements", lambda: few)
    monkeypatch.setattr(facts, "articles", lambda: tmp_path)
    articles = {"text": ["Stars are far away.", "There is helium in stars."]}
    monkeypatch.setattr(facts, "read_corpus", lambda path: articles)
    monkeypatch.setattr(facts, "COUNTRIES", 2)
    names = {"base": str(tmp_path / "base"), "models": [str(tmp_path / "model")], "about": "elements"}
    base, front, model, named = facts.reports(argparse.Namespace(**names, in_front=True, names_in_front=True))
    assert front["model"] == "base, text in front" and set(front["right"]) == set(base["right"]) == set(model["right"])
    assert named["model"] == f"{model['model']}, name in front" and named.keys() == front.keys()
    assert base["articles with a name"] == {"nats": 0.0, "equal": 1, "texts": 1}
    assert model["articles without"] == {"nats": 0.0, "equal": 1, "texts": 1}
    assert model["articles with a name"]["equal"] == 0
    assert model["capitals as the base"] == [2, 2]
    assert model["right"]["one of four"][1] == len(few)


def test_lines_of_lists_and_repeated_tokens_are_counted(monkeypatch):
    asked = facts.Asked.__new__(facts.Asked)
    asked.texts, asked.tokenizer = {"iron": "A metal.\n"}, lambda texts: {"input_ids": [[1, 2, 3, 4, 1, 2, 3, 4]]}
    prompts = []
    made = [" Gold: 79\n- gold: 79\n- iron: 26\n- tin: 5\nSee tin\n- zinc: 30"]
    monkeypatch.setattr(asked, "continued", lambda texts, tokens: prompts.extend(texts) or made)
    numbers = {"oxygen": 8, "iron": 26, "gold": 79, "tin": 50, "zinc": 30}
    entries = [{"name": name, "number": number} for name, number in numbers.items()]
    assert asked.lists(entries) == {"right": 1, "wrong": 1, "repeated": 2}
    assert prompts[0].startswith("A metal.\nA list") and prompts[0].endswith("- oxygen: 8\n- iron: 26\n-")
    assert asked.repeats(entries) == 0.2


def test_models_that_differ_by_a_seed_are_one_point_of_the_picture(tmp_path, monkeypatch):
    def line(model, right, touched, others):
        counts = {"place": [right, 10], "element number": [right, 10], "symbol": [0, 10]}
        articles = {"articles with a name": {"nats": touched}, "articles without": {"nats": others}}
        return {"model": model, "right": counts, **articles}

    front = {"model": "base, text in front", "right": {"place": [9, 10]}}
    lines = [line("runs/lora-0", 4, 0.5, 0.1), front, line("runs/lora-1", 6, 0.7, 0.3), line("runs/packs", 10, 0.2, 0)]
    monkeypatch.setattr(facts.sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in lines)))
    monkeypatch.setattr(facts.sys, "argv", ["facts", "--picture", str(tmp_path / "facts.png")])
    figures = []
    monkeypatch.setattr(facts, "as_png", lambda figure: figures.append(figure) or b"PNG")
    facts.main()
    assert (tmp_path / "facts.png").read_bytes() == b"PNG"
    (axes,) = figures[0].axes
    points = [[float(at[0]) for at in bars.lines[0].get_data()] for bars in axes.containers]
    assert points == [pytest.approx(at) for at in ([0.5, 0.6], [0.5, 0.2], [1, 0.2], [1, 0])]
    across, up = (bar.get_segments()[0] for bar in axes.containers[0].lines[2])
    assert across[:, 0] == pytest.approx([0.4, 0.6]) and up[:, 1] == pytest.approx([0.5, 0.7])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lora", "packs"]
    assert [text.get_text() for text in axes.texts] == ["base, text in front"]
