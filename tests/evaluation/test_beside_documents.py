"""The document that is nearest to a question is put in front of the question, by every kind of task."""

import json

import pytest
from evaluation.byte_models import byte_model, byte_tokenizer, save_byte_model
from evaluation.questions import QUESTIONS, write_questions
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree

from midus_hf.cli.evaluate import main
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.nearest_documents import NearestDocuments
from midus_hf.topics.tree_files import TreeOrigin

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from midus_hf.evaluation.fetching import behind_documents
from midus_hf.evaluation.harness import MidusLM, Tasks


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture
def data(tmp_path):
    return write_questions(tmp_path / "questions")


def document_of(questions):
    return [f"It is said of {question[:6]!r}." for question in questions]


def request(kind: str, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0, ("task", 0, 1))


def test_a_document_stands_in_front_of_a_context_and_requests_stay_as_they_were():
    requests = [request("loglikelihood", "sky is", " blue"), request("loglikelihood", "", " blue")]
    changed = behind_documents(requests, ["sky", "sky"], lambda questions: ["About the sky.", "About the sky."])
    assert [each.args for each in changed] == [("About the sky.\n\nsky is", " blue"), ("", " blue")]
    assert [each.args for each in requests] == [("sky is", " blue"), ("", " blue")]


def test_both_kinds_of_requests_are_asked_behind_documents():
    asked = MidusLM(byte_model("llama"), tokenizer=byte_tokenizer(), find_documents=document_of)
    plain = MidusLM(asked.model, tokenizer=byte_tokenizer())
    for kind, last in (("loglikelihood", " blue"), ("generate_until", {"max_gen_toks": 4, "until": []})):
        requests = [request(kind, "sky is", last), request(kind, "lions", last)]
        written_out = [
            request(kind, "It is said of 'sky is'.\n\nsky is", last),
            request(kind, "It is said of 'lions'.\n\nlions", last),
        ]
        found = getattr(asked, kind)(requests, disable_tqdm=True)
        assert found == getattr(plain, kind)(written_out, disable_tqdm=True)
        assert found != getattr(plain, kind)(requests, disable_tqdm=True)


@pytest.mark.parametrize("name", QUESTIONS)
def test_documents_are_found_by_the_question_without_worked_examples(name, data):
    model, tokenizer, asked = byte_model("llama"), byte_tokenizer(), []

    def spy(questions):
        asked[-1].extend(questions)
        return document_of(questions)

    for shots in (0, 1):
        asked.append([])
        Tasks([name], data=data).run(model, tokenizer, find_documents=spy, num_fewshot=shots, quiet=True)
    assert asked[0] and asked[1] == asked[0]


def test_the_command_tells_which_document_each_question_was_asked_behind(bert, data, tmp_path, capsys):
    model = save_byte_model("llama", tmp_path / "model")
    rows = [{"said": f"w{index} w{index + 3}\nw{index + 9}"} for index in range(12)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def asked(*words: str) -> list[dict]:
        answers = tmp_path / "answers.jsonl"
        main(
            [str(model), "--tasks", "facts,piqa", "--data", str(data), "--json", "--set", f"answers={answers}", *words]
        )
        settings = json.loads(capsys.readouterr().out)["settings"]
        found = [json.loads(line) for line in answers.read_text().strip("\n").split("\n")]
        answers.unlink()
        return [{"settings": settings, **row} for row in found]

    documents = ["--set", f"documents={tmp_path / 'documents.jsonl'}", "--set", "column=said"]
    whole = asked(*documents, "--set", f"embedding_model={bert}")
    cut = asked(*documents, "--set", f"embedding_model={bert}", "--set", "passage_tokens=2")
    for found, texts in (
        (whole, [row["said"] for row in rows]),
        (cut, [p for row in rows for p in row["said"].split("\n")]),
    ):
        nearest = NearestDocuments(texts, TextEmbedder(str(bert)))
        assert [row["document"] for row in found] == nearest([asked_for(row) for row in found])
    assert {row["settings"]["passage_tokens"] for row in cut} == {2}
    random_tree(3, 2, width=WIDTH, origin=TreeOrigin(embedding_model=str(bert))).save(tmp_path / "tree")
    by_tree = asked(*documents, "--retriever", str(tmp_path / "tree"))
    assert [row["document"] for row in by_tree] == [row["document"] for row in whole]
    assert "document" not in asked()[0]
    main([str(model), "--tasks", "facts", "--data", str(data), *documents, "--set", f"embedding_model={bert}"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Each question of a task had the nearest document of " in said


def asked_for(row: dict) -> str:
    question = row["question"]["question"]
    return f"Question: {question}\nAnswer:" if row["task"] == "piqa" else question
