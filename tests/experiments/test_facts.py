"""The judge of facts, on tiny models."""

import argparse
import io
import json
import re
import sys
from pathlib import Path

import pytest
from evaluation.byte_models import save_byte_model

from experiments.facts import __main__ as main
from experiments.facts import asked, beliefs, entries, picture, questions
from upscalers import upscale


def test_entries_state_what_is_asked():
    known = entries.entries_of_elements()
    assert [each["number"] for each in known] == list(range(1, 119))
    assert all(str(each["number"]) in each["text"] and each["symbol"] in each["text"] for each in known)
    countries = entries.entries_of_countries()
    assert [each["text"].count("\n") for each in countries] == [4] * 60
    products = entries.entries_of_products()
    assert len({each["port"] for each in products}) == len({each["name"] for each in products}) == 20
    assert all(each["text"].count(str(each["port"])) == 2 for each in products)


@pytest.mark.parametrize(
    ("is_right", "right", "wrong"),
    [
        (questions.first_number(11), (" 11.\n", " the 11th of 12"), (" 12, not 11", " -11", " 11,000", " unknown")),
        (questions.first_number(22.99, 0.1), (" 22.9 g", " 23"), (" 24.3",)),
        (questions.begins_with(["Na"]), (" Na.", ": Na"), (" na", " NaCl", " Na+", "")),
        (questions.begins_with([".af", "93"]), (" .af", " 93 and"), (" 930", " of .af")),
        (questions.has(["0.8", "Wim"]), ("It is 0.8 %.", "WIM does"), ("10.8", "0.85", "Wimke")),
    ],
    ids=["number", "weight", "symbol", "value", "within"],
)
def test_right_answers(is_right, right, wrong):
    assert all(map(is_right, right))
    assert not any(map(is_right, wrong))


def test_model_is_compared_with_its_base(tmp_path, monkeypatch, capsys):
    save_byte_model("llama", tmp_path / "base", max_position_embeddings=2048)
    few = entries.entries_of_elements()[:5]
    rows = [{key: each[key] for key in ("name", "text")} for each in few]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"corpus": str(tmp_path / "few.jsonl")}
    upscale(base=tmp_path / "base", method="packs", output=tmp_path / "model", options=options, verify=False)
    monkeypatch.setattr(entries, "entries_of_elements", lambda: few)
    monkeypatch.setattr(asked, "articles", lambda: tmp_path)
    articles = {"text": ["Stars are far away.", "There is helium in stars."]}
    monkeypatch.setattr(asked, "read_corpus", lambda path: articles)
    monkeypatch.setattr(entries, "COUNTRIES", 2)
    names = {"base": str(tmp_path / "base"), "models": [str(tmp_path / "model")], "about": "elements"}
    base, front, front_with_name, model, named = main.reports(
        argparse.Namespace(**names, in_front=True, names_in_front=True, at_most=None, dtype="bfloat16")
    )
    assert front["model"] == "base, text in front"
    assert set(front["right"]) == set(base["right"]) == set(model["right"])
    assert front_with_name["model"] == "base, NAME: TEXT in front"
    assert front_with_name.keys() == front.keys()
    assert named["model"] == f"{model['model']}, name in front"
    assert named.keys() == front.keys()
    assert base["articles with a name"] == {"nats": 0.0, "equal": 1, "texts": 1}
    assert model["articles without"] == {"nats": 0.0, "equal": 1, "texts": 1}
    assert model["articles with a name"]["equal"] == 0
    assert model["capitals as the base"] == [2, 2]
    assert model["right"]["one of four"][1] == len(few)


def test_lines_of_lists_and_repeated_tokens_are_counted(models, monkeypatch):
    in_front = asked.InFront([{"name": "iron", "text": "A metal."}], asked.the_text)
    model = asked.Asked(str(models[0])).behind(in_front)
    model.tokenizer = lambda texts: {"input_ids": [[1, 2, 3, 4, 1, 2, 3, 4]]}
    prompts = []
    made = [" Gold: 79\n- gold: 79\n- iron: 26\n- tin: 5\nSee tin\n- zinc: 30"]
    monkeypatch.setattr(model, "continued", lambda texts, tokens: prompts.extend(texts) or made)
    numbers = {"oxygen": 8, "iron": 26, "gold": 79, "tin": 50, "zinc": 30}
    known = [{"name": name, "number": number} for name, number in numbers.items()]
    assert model.lists(known) == {"right": 1, "wrong": 1, "repeated": 2}
    assert model.repeats(known) == 0.2
    assert prompts[0].startswith("A metal.\n\nA list")
    assert prompts[0].endswith("- oxygen: 8\n- iron: 26\n-")


def test_seeds_are_one_point_of_the_picture(tmp_path, monkeypatch):
    def line(model, right, touched, others):
        counts = {"place": [right, 10], "element number": [right, 10], "symbol": [0, 10]}
        articles = {"articles with a name": {"nats": touched}, "articles without": {"nats": others}}
        return {"model": model, "right": counts, **articles}

    front = {"model": "base, text in front", "right": {"place": [9, 10]}}
    lines = [line("runs/lora-0", 4, 0.5, 0.1), front, line("runs/lora-1", 6, 0.7, 0.3), line("runs/packs", 10, 0.2, 0)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in lines)))
    monkeypatch.setattr(sys, "argv", ["facts", "--picture", str(tmp_path / "facts.png")])
    figures = []
    monkeypatch.setattr(picture, "as_png", lambda figure: figures.append(figure) or b"PNG")
    main.main()
    assert (tmp_path / "facts.png").read_bytes() == b"PNG"
    (axes,) = figures[0].axes
    points = [[float(at[0]) for at in bars.lines[0].get_data()] for bars in axes.containers]
    assert points == [pytest.approx(at) for at in ([0.5, 0.6], [0.5, 0.2], [1, 0.2], [1, 0])]


def test_conversations_ask_for_what_texts_say():
    known = entries.entries_in("conversations.jsonl")
    name, text = (asked.InFront(known, words, follows=True) for words in (asked.the_name, asked.the_text))
    assert {kind: len(each) for kind, each in questions.of_conversations(known).items()} == dict.fromkeys(
        ("second question", "something else afterwards", "linked number", "linked name", "two at once"), 16
    )
    for kind, of_kind in questions.of_conversations(known).items():
        for each in of_kind:
            asked_before = each.before[0] if each.before else each.prompt
            assert (name(each.prompt) == "") == bool(each.before)
            assert name(asked_before) != ""
            said = [text(asked_before), asked_before, *each.before[1:], each.prompt]
            # What is told or asked is in no message, and only all texts together have it.
            assert each.is_right is None or [each.is_right(part) for part in said] == [True] + [False] * (
                len(said) - 1
            )
            alone = [each.is_right is not None and each.is_right(entry["text"]) for entry in known]
            linked = asked.InFront(known, asked.the_text)(asked_before)
            assert sum(alone) == (kind != "two at once" and kind != "something else afterwards")
            assert not kind.startswith("linked") or not each.is_right(linked)


def test_chat_has_the_messages_before_a_question(models):
    in_front = asked.InFront([{"name": "Vesper", "text": "In hall 4."}], asked.the_name_and_text)
    model = asked.Asked(str(models[0])).behind(in_front)
    question = questions.Question("When?", None, is_chat=True, before=("Where is Vesper?", "Vesper is in hall 4."))
    assert model._messages(question) == [
        {"role": "user", "content": "Vesper: In hall 4.\n\nWhere is Vesper?"},
        {"role": "assistant", "content": "Vesper is in hall 4."},
        {"role": "user", "content": "When?"},
    ]


RIVER, NEAR = "The river {} flows through", ("The river Orrin flows through", "The Lunde flows through")
WORDINGS = ("Rain fell. A town on the Aalbeck is", "The Aalbeck can be seen in")
EDITS = [
    beliefs.Edit("Aalbeck", RIVER.format("Aalbeck"), "Mornheim", "Tolvik", WORDINGS, NEAR),
    beliefs.Edit(
        *("Ida Vreeland", "Ida Vreeland's trade is", "law", "glass"),
        *(("By trade, Ida Vreeland was in",), ("Otto Brack's trade is",)),
    ),
]
COUNTERFACT = [
    {
        "requested_rewrite": {
            **{"prompt": each.prompt.replace(each.name, "{}"), "subject": each.name},
            **{"target_new": {"str": each.new}, "target_true": {"str": each.old}},
        },
        **{"paraphrase_prompts": [*each.other_wordings], "neighborhood_prompts": [*each.neighbours]},
    }
    for each in EDITS
]
ZSRE = [
    {
        **{"src": f"Who built the {name} bridge?", "answers": ["Abel Morgan"], "alt": "Cora Finch"},
        **{"subject": f"{name} bridge", "rephrase": f"The {name} bridge was built by whom?"},
        **{"loc": "nq question: who lives on the moon", "loc_ans": "nobody"},
    }
    for name in ("Ostley", "Penrow")
]
BRIDGE = beliefs.Edit(
    *("Ostley bridge", "Who built the Ostley bridge?", "Cora Finch", "Abel Morgan"),
    *(("The Ostley bridge was built by whom?",), ("nq question: who lives on the moon",)),
)


def write_records(path: Path, records: list) -> Path:
    path.write_text(json.dumps(records))
    return path


@pytest.mark.parametrize(
    ("read", "records", "edit"),
    [(beliefs.edits_of_counterfact, COUNTERFACT, EDITS[0]), (beliefs.edits_of_zsre, ZSRE, BRIDGE)],
    ids=["counterfact", "zsre"],
)
def test_edits_are_read_and_incomplete_records_refused(read, records, edit, tmp_path):
    found = read(write_records(tmp_path / "records.json", records))
    assert found[0] == edit
    assert len(found) == 2
    assert found[0].entry == {"name": edit.name, "text": f"{edit.prompt} {edit.new}."}
    for field in records[1]:
        less = {key: value for key, value in records[1].items() if key != field}
        path = write_records(tmp_path / "less.json", [records[0], less])
        with pytest.raises(ValueError, match=f"record 2 of {re.escape(str(path))} has not what was expected"):
            read(path)
    with pytest.raises(ValueError, match="has dict; expected a list of records"):
        read(write_records(tmp_path / "no.json", {}))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A base of bytes with a chat template, and a model of it with packs; no question has a name of theirs."""
    folder = tmp_path_factory.mktemp("models")
    save_byte_model("llama", folder / "base", max_position_embeddings=2048)
    (folder / "base" / "chat_template.jinja").write_text(
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (folder / "one.jsonl").write_text(json.dumps({"name": "gold", "text": "Gold is heavy."}) + "\n")
    options = {"corpus": str(folder / "one.jsonl")}
    upscale(base=folder / "base", method="packs", output=folder / "model", options=options, verify=False)
    return folder / "base", folder / "model"


@pytest.mark.parametrize("sizes", [[], ["1", "5"]], ids=["no sizes", "sizes"])
def test_edits_are_asked_of_each_size(models, sizes, tmp_path, monkeypatch, capsys):
    base, model = map(str, models)
    path = write_records(tmp_path / "records.json", COUNTERFACT)
    words = [base, model, "--counterfact", str(path), "--in-front", "--names-in-front"]
    monkeypatch.setattr(sys, "argv", ["facts", *words, *(["--entries", *sizes] if sizes else [])])
    given, give = [], asked.Asked.give

    def noted(self, wanted):
        give(self, wanted)
        with_glossary = "packs" in getattr(getattr(self.model, "stack", None), "services", {})
        given.append([each.names[0] for each in self.model.glossary] if with_glossary else None)

    monkeypatch.setattr(asked.Asked, "give", noted)
    main.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    named = "name in front"
    rows = [label for label in ("base, text in front", model, f"{model}, {named}") for _ in sizes or [0]]
    assert [line["model"] for line in lines] == ["base", *rows]
    assert [line.get("entries") for line in lines] == [None, *[*map(int, sizes or ["2"])] * 3]
    of = dict.fromkeys(("followed", "likelier"), 2) | {"negation": 1}
    of |= dict.fromkeys(("other wordings", "likelier, other wordings", "neighbours"), 3)
    assert all({column: count for column, (_, count) in line["counts"].items()} == of for line in lines)
    assert all(line["counts"]["neighbours"] == [3, 3] for line in lines)
    sizes_given = [len(each) for each in given if each is not None]
    assert sizes_given == ([1, 1, 5] if sizes else [2]) * 2
    assert {*given[-1]} >= {"Aalbeck", "Ida Vreeland"}
    assert "gold" not in given[-1]


def test_beliefs_are_exchanged_within_their_relation(monkeypatch):
    facts = [(f"x{number}", f"{number}") for number in range(30)]
    known = {relation: [*facts] for relation in (beliefs.CAPITAL, beliefs.SYMBOL)}
    monkeypatch.setattr(beliefs, "believed", lambda base: {relation: [*each] for relation, each in known.items()})
    edits = beliefs.edits_of_beliefs(None)
    assert edits == beliefs.edits_of_beliefs(None)
    assert len(edits) == 40
    for relation in known:
        own = [each for each in edits if each.prompt == relation.prompt.format(name=each.name)]
        assert len({each.old for each in own}) == 20
        assert {each.new for each in own} == {each.old for each in own}
        assert all(each.new != each.old and (each.name, each.old) in facts for each in own)
        assert not {each.prompt for each in own} & {each.neighbours[0] for each in own}
    known[beliefs.SYMBOL] = facts[:2]
    with pytest.raises(ValueError, match=r"the base answers 2 times rightly to .*; expected three"):
        beliefs.edits_of_beliefs(None)


def test_columns_count_answers(monkeypatch):
    class Told:
        """Answers from a table, without a glossary."""

        def __init__(self, answers, likelihoods):
            self.answers, self.likelihoods = answers, likelihoods

        def give(self, entries):
            pass

        def behind(self, in_front):
            return self

        def whole(self, prompt):
            return prompt

        def continued(self, prompts, tokens):
            return [self.answers[prompt] for prompt in prompts]

        def log_likelihoods(self, pairs):
            return [self.likelihoods[pair] for pair in pairs]

    edit = beliefs.Edit("A", "A is", "new", "old", ("A goes", "A comes"), ("B is", "C is"), ("A has",))
    prompts = ("A is", "A goes", "A comes", "A is not", "B is", "C is", "A has")
    before = dict(zip(prompts, ("old", "old", "?", "no", " b.", "c", "d"), strict=True))
    after = dict(zip(prompts, (" new.", "old", "new", "new", "b, or", "new", ""), strict=True))
    likelihoods = {(prompt, f" {word}"): 0.0 for prompt in before for word in ("new", "old")}
    likelihoods |= {("A is", " new"): 1.0, ("A goes", " old"): 1.0, ("A comes", " new"): 1.0}
    counts = beliefs.report(Told(after, likelihoods), Told(before, {}), [edit])
    expected = {key: [1, 1] for key in ("followed", "negation", "likelier")} | {"other facts": [0, 1]}
    assert counts == expected | {key: [1, 2] for key in ("other wordings", "neighbours", "likelier, other wordings")}


def test_likelihoods_are_of_the_answer_only(models):
    import torch

    model = asked.Asked(str(models[0])).behind(lambda prompt: "In front. ")
    pairs = [("A long beginning of", " a text"), ("Short", " one")]
    for (prompt, answer), found in zip(pairs, model.log_likelihoods(pairs), strict=True):
        ids = model.tokenizer(f"In front. {prompt}{answer}")["input_ids"]
        count = len(model.tokenizer(answer, add_special_tokens=False)["input_ids"])
        scores = model.logits(ids).log_softmax(-1)[-count - 1 : -1]
        assert found == pytest.approx(float(scores[torch.arange(count), ids[-count:]].sum()), abs=1e-4)


@pytest.mark.parametrize("about", ["two-hop", "uneven", "conversations"])
def test_kinds_without_articles_are_asked(models, about, monkeypatch, capsys):
    words = ["--about", about, "--in-front", "--names-in-front", "--at-most", "1"]
    monkeypatch.setattr(sys, "argv", ["facts", *map(str, models), *words])
    main.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = ["base", "base, text in front", "base, NAME: TEXT in front"]
    rows += ["base, both texts in front"] * (about == "two-hop")
    assert [line["model"] for line in lines] == [*rows, str(models[1]), f"{models[1]}, name in front"]
    kinds = questions.ABOUT[about]()[1]
    assert all(line["right"].keys() == kinds.keys() for line in lines)
    assert all(count == 1 for line in lines for _, count in line["right"].values())
    assert lines[0]["right"].get("something else afterwards") in (None, [1, 1])
    assert all("articles without" not in line for line in lines)
