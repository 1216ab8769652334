"""The document that is nearest to a question is put in front of the question, by every kind of task."""

import json

import pytest
from evaluation.byte_models import byte_model, byte_tokenizer, save_byte_model
from evaluation.questions import QUESTIONS, write_questions
from topics.tiny_bert import save_tiny_bert

from midus_hf.cli.evaluate import main
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.nearest_documents import NearestDocuments

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from midus_hf.evaluation import harness
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


def test_the_command_puts_the_nearest_document_or_passage_in_front(bert, data, tmp_path, capsys, monkeypatch):
    model = save_byte_model("llama", tmp_path / "model")
    said = [f"w{index} w{index + 3}\nw{index + 9}" for index in range(12)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in said))
    words = [str(model), "--tasks", "facts", "--data", str(data), "--set", f"embedding_model={bert}"]
    words += ["--set", f"documents={tmp_path / 'documents.jsonl'}", "--set", "column=said"]
    asked = []
    behind = harness.behind_documents
    monkeypatch.setattr(
        harness, "behind_documents", lambda *arguments: asked.append(behind(*arguments)) or behind(*arguments)
    )
    passages = [passage for text in said for passage in text.split("\n")]
    for more, texts in (([], said), (["--set", "passage_tokens=2"], passages)):
        main([*words, *more])
        assert "Each question of a task had the nearest document of " in " ".join(capsys.readouterr().out.split())
        questions = [row["question"] for row in QUESTIONS["facts"]]
        nearest = NearestDocuments(texts, TextEmbedder(str(bert)))(questions)
        contexts = [f"{document}\n\n{question}" for document, question in zip(nearest, questions, strict=True)]
        assert [request.args[0] for request in asked.pop()] == contexts
