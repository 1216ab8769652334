"""What the model reproduces of a glossary: values that its texts state, and which spellings of names are found."""

import csv
import json
import string

import pytest
import torch
from models.pack_models import pack_model, tiny_tokenizer
from sft.tiny_chats import write_rows
from tiny import save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from midus_hf.cli.look import main as look
from midus_hf.look.glossary import check_glossary, glossary_finding, glossary_table, values_of
from midus_hf.memories.packs.glossary import Entry
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.packs import delete_entries
from upscalers.runs.upscale import upscale

ENTRIES = [
    Entry(("Merlin", "NaCl"), "It is at port 80. Ask Q."),
    Entry(("Merlin cache",), "no more, nor less"),
    Entry(("Unit 1",), "Unit 1 has 7."),
]
NAMES_OF = [entry.names[0] for entry in ENTRIES]
NAMES = ["gold", "tin", "zinc", "iron", "lead", "neon"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("The Kestrel gateway listens on port 8443.", [("The Kestrel gateway listens on port", " 8443")]),
        ("In Paris. Of Rome and 1,024.5 cats", [("In", " Paris"), ("Of", " Rome"), ("Of Rome and", " 1,024.5")]),
        ("Costs $5\nat 10:30 sharp", [("Costs $", "5"), ("at", " 10:30")]),
        ("青隼网关监听端口8443。포트 8080을", [("青隼网关监听端口", "8443"), ("青隼网关监听端口8443。포트", " 8080")]),
        ("8443 is the port of the Kestrel", []),
        ("Nothing. At all", []),
    ],
)
def test_values_are_numbers_and_names_within_sentences(text, values):
    """Words of the entry's names are none."""
    assert [tuple(value) for value in values_of(text, ["Kestrel gateway"])] == values


def test_unfound_spellings_and_containing_names_are_listed():
    model = pack_model("llama", torch.float32, ENTRIES)
    rows = {row["entry"]: row for row in check_glossary(model)}
    merlin, cache, unit = (rows[name] for name in NAMES_OF)
    assert merlin["not_found"] == "nacl (lower case), NACL (capitals)"
    also = ["an s", "other separators, an s", "other separators"]
    assert [row["also_with"] for row in (merlin, cache, unit)] == also
    assert merlin["within"] == "Merlin cache"
    assert cache["within"] == ""
    # The tiny tokenizer has no token for a no-break space.
    assert cache["not_found"] == "Merlin\u00a0cache (no-break spaces)"
    assert [row["entry"] for row in check_glossary(model, limit=1)] == ["Merlin"]


@pytest.mark.parametrize("batch_size", [5, 36])
def test_value_is_right_if_it_is_the_likeliest_token(batch_size):
    """A text that states every digit and capital after one beginning: the one that a model's likeliest token is comes back."""
    signs, tokenizer = string.digits + string.ascii_uppercase, tiny_tokenizer()
    base = tiny_model("llama", torch.float32)
    entries = [Entry((name,), " ".join(f"{name} ${sign}." for sign in signs)) for name in NAMES]
    model = pack_model("llama", torch.float32, entries)

    def likeliest(model, text):
        with torch.no_grad():
            return tokenizer.decode(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1].argmax())

    rows = {row["entry"]: row for row in check_glossary(model, batch_size=batch_size)}
    totals = dict.fromkeys(("right", "without", "front"), 0)
    for entry in entries:
        (name,) = entry.names
        asked = f"{name} $"
        said = {
            "right": likeliest(model, f"{name}\n{asked}"),
            "without": likeliest(base, f"{name}\n{asked}"),
            "front": likeliest(base, f"{entry.text}\n\n{asked}"),
        }
        assert {key: rows[name][key] for key in said} == {key: int(token in signs) for key, token in said.items()}
        assert {*signs} - {*rows[name]["lost"].split(", ")} == {*signs} & {said["right"]}
        totals = {key: totals[key] + rows[name][key] for key in totals}
    assert all(totals.values()), totals
    assert glossary_finding([*rows.values()]).startswith(
        f"{totals['right']} of {len(NAMES) * 36} values come back with packs, {totals['without']} without, "
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    room = tmp_path_factory.mktemp("room")
    save_tiny_model("llama", room / "base")
    tiny_tokenizer().save_pretrained(room / "base")
    rows = [{"name": list(entry.names), "text": entry.text} for entry in ENTRIES]
    (room / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"corpus": str(room / "rows.jsonl"), "score_bias": 2.0}
    upscale(base=room / "base", method="packs", output=room / "model", options=options)
    return room


def test_batch_size_of_questions_is_refused(folder, capsys):
    assert look(["glossary", str(folder / "model"), "--questions", "x.jsonl", "--batch-size", "2"]) == 2
    assert "batch-size is 2 and questions are given, which are asked one by one" in capsys.readouterr().err


def test_status_is_1_if_fewer_values_are_right_than_asked(folder, capsys, tmp_path):
    assert look(["glossary", str(folder / "model"), "--at-least", "1", "--output", str(tmp_path / "all.csv")]) == 1
    said, message = capsys.readouterr(), "0.0% of the values come back; expected at least 100.0% (--at-least)."
    assert said.err.splitlines()[-1] == f"midus look glossary: {message}"
    assert "the entries' own sentences" in said.out
    assert "--questions" in said.out
    assert "0 of 3 values come back with packs" in said.out
    assert "no capitalised word: 1." in said.out
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert [row["entry"] for row in rows] == ["Merlin", "Unit 1", "Merlin cache"]
    assert rows[0]["lost"] == "80, Q"
    for least in ([], ["--at-least", "0"]):
        assert look(["glossary", str(folder / "model"), "--json", *least]) == 0
        assert json.loads(capsys.readouterr().out)["share"] == 0
    assert look(["glossary", str(folder / "base")]) == 2
    assert "expected one upscaled with" in capsys.readouterr().err


def said_by(folder, text):
    """Return what a model writes after a text, without a chat template, in one line."""
    tokenizer, model = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    return " ".join(tokenizer.decode(written, skip_special_tokens=True).split())


def test_questions_are_asked_with_packs_without_and_after_texts(folder, capsys, tmp_path):
    question = "Is Merlin\nat Unit 1?"
    names, texts = "Merlin\nUnit 1\n", "It is at port 80. Ask Q.\n\nUnit 1 has 7.\n\n"
    said = {
        "right": said_by(folder / "model", names + question),
        "without": said_by(folder / "base", names + question),
        "front": said_by(folder / "base", texts + question),
    }
    assert len({*said.values()}) == 3
    rows = [{"question": question, "answer": f" {answer.swapcase()} "} for answer in said.values()]
    path = write_rows(tmp_path / "questions.jsonl", rows)
    words = ["glossary", str(folder / "model"), "--questions", str(path)]
    assert look([*words, "--at-least", "0.5", "--output", str(tmp_path / "all.csv")]) == 1
    printed, message = capsys.readouterr(), "33.3% of the answers are right; expected at least 50.0% (--at-least)."
    assert printed.err.splitlines()[-1].endswith(message)
    assert "1 of 3 answers are right with packs, 1 without, 1 with the text in front." in printed.out
    written = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert {row["said"] for row in written} == {said["right"]}
    assert written[-1]["right"] == "True"
    for row in written:
        (key,) = [key for key in said if row[key] == "True"]
        assert (row["question"], row["answer"]) == (question, said[key].swapcase())
    assert look([*words, "--at-least", "0.3", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"] == 1
    write_rows(path, [{"question": "Are Merlins at Unit-1, Merlin?", "answer": "no"}])
    assert look([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["read_as"] == "Merlins: Merlin, Unit-1: Unit 1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "text": "b"}], "whose rows have question, text; expected the columns question and answer"),
        ([{"question": "a", "answer": " "}], "has ' ' under 'answer'; expected a text. Write it, or remove the row."),
        ([{"question": "a", "answer": "\u200b"}], r"has '\u200b' under 'answer'; expected a text."),
        ([{"question": 3, "answer": "b"}], "has 3 under 'question'; expected a text."),
    ],
)
def test_wrong_questions_are_refused_before_loading(rows, message, folder, capsys, tmp_path):
    path = write_rows(tmp_path / "questions.jsonl", rows)
    assert look(["glossary", str(folder / "base"), "--questions", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Merlin cache", None], ids=["no value", "no entry"])
def test_no_share_is_reached_without_values(name, folder, capsys, tmp_path):
    delete_entries(EditRequest(folder / "model", tmp_path / "model"), [each for each in NAMES_OF if each != name])
    assert look(["glossary", str(tmp_path / "model"), "--at-least", "0"]) == 1
    said = (
        "midus look glossary: the texts state no number and no capitalised word, so nothing was measured; expected a"
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"{said} value for --at-least."
    assert look(["glossary", str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"] is None


def test_glossary_table_has_the_worst_entries():
    row = {"values": 1, **dict.fromkeys(("right", "without", "front"), 0)}
    row |= dict.fromkeys(("lost", "not_found", "also_with", "within"), "")
    table = glossary_table([{"entry": str(number), **row} for number in range(32)])
    assert len(table.rows) == 30
    assert "2 more in --output FILE.csv" in table.title
