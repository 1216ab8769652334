"""The judge of facts: what it asks, when an answer is right, and what it reports of a model with packs, on a tiny base."""

import argparse
import io
import json

import pytest
from evaluation.byte_models import save_byte_model

from experiments import facts
from upscalers import upscale


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
