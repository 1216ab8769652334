"""Tasks of edited knowledge read the files of CounterFact and zsRE as their authors published them."""

import json

import pytest
from evaluation.byte_models import byte_model, byte_tokenizer

pytest.importorskip("lm_eval")

from midus_hf.evaluation.harness import Tasks
from midus_hf.evaluation.knowledge_edits import EDIT_TASKS

COUNTERFACT = [
    {
        "case_id": 0,
        "requested_rewrite": {
            "prompt": "The mother tongue of {} is",
            "target_new": {"str": "English", "id": "Q1860"},
            "target_true": {"str": "French", "id": "Q150"},
            "subject": "Danielle Darrieux",
        },
        "paraphrase_prompts": ["Danielle Darrieux, a native", "Danielle Darrieux spoke the language"],
        "neighborhood_prompts": ["The mother tongue of Léon Blum is"],
        "generation_prompts": [],
    }
]
ZSRE = [
    {
        "subject": "Watts Humphrey",
        "src": "What university did Watts Humphrey attend?",
        "rephrase": "What university did Watts Humphrey take part in?",
        "alt": "University of Michigan",
        "answers": ["Illinois Institute of Technology"],
        "loc": "nq question: who played desmond doss father in hacksaw ridge",
        "loc_ans": "Hugo Weaving",
    }
]
QUESTIONS = {
    "counterfact_efficacy": ["The mother tongue of Danielle Darrieux is"],
    "counterfact_paraphrase": ["Danielle Darrieux, a native", "Danielle Darrieux spoke the language"],
    "counterfact_neighborhood": ["The mother tongue of Léon Blum is"],
    "zsre_efficacy": ["What university did Watts Humphrey attend?"],
    "zsre_paraphrase": ["What university did Watts Humphrey take part in?"],
    "zsre_neighborhood": ["who played desmond doss father in hacksaw ridge?"],
}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "counterfact.json").write_text(json.dumps(COUNTERFACT))
    (tmp_path / "zsre.json").write_text(json.dumps(ZSRE))
    return tmp_path


def task_of(name, data):
    tasks = Tasks([name], data=data)
    return tasks.manager.load(tasks.specs)["tasks"][f"midus_{name}"]


@pytest.mark.parametrize("name", EDIT_TASKS)
def test_each_kind_asks_its_questions(name, data):
    task = task_of(name, data)
    documents = list(task.test_docs())
    assert [task.doc_to_text(document) for document in documents] == QUESTIONS[name]


@pytest.mark.parametrize(
    ("name", "right"), [("efficacy", "English"), ("paraphrase", "English"), ("neighborhood", "French")]
)
def test_the_new_object_is_right_for_the_subject_and_the_true_one_for_others(name, right, data):
    task = task_of(f"counterfact_{name}", data)
    document = task.test_docs()[0]
    assert task.doc_to_choice(document)[task.doc_to_target(document)] == right


def test_answers_of_zsre_are_the_new_ones_and_those_of_the_other_question(data):
    answers = {kind: task_of(f"zsre_{kind}", data).test_docs()[0]["answers"] for kind in ("efficacy", "neighborhood")}
    assert answers == {"efficacy": ["Illinois Institute of Technology"], "neighborhood": ["Hugo Weaving"]}


def test_an_unrelated_question_has_one_question_mark(tmp_path):
    (tmp_path / "zsre.json").write_text(json.dumps([ZSRE[0] | {"loc": "nq question: who wrote emma?"}]))
    assert task_of("zsre_neighborhood", tmp_path).test_docs()[0]["question"] == "who wrote emma?"


def test_a_model_is_scored_on_all_of_them(data):
    scores = Tasks(list(EDIT_TASKS), data=data).run(byte_model("llama"), byte_tokenizer())
    assert {name: score["num_questions"] for name, score in scores.items()} == {
        name: len(questions) for name, questions in QUESTIONS.items()
    }
    assert scores["counterfact_paraphrase"]["acc"] in (0, 0.5, 1) and "zsre_efficacy" in scores


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("counterfact_efficacy", None, r"holds no counterfact.json; expected the file of counterfact as its authors"),
        ("zsre_paraphrase", [{"src": "?", "answers": ["a"]}], "edit 0 of the file has no usable 'rephrase'; expected"),
        (
            "counterfact_paraphrase",
            [COUNTERFACT[0] | {"requested_rewrite": COUNTERFACT[0]["requested_rewrite"] | {"prompt": "{} or {} is"}}],
            r"edit 0 of the file: prompt is '\{\} or \{\} is'; expected one \{\}, for the subject. Correct it there.",
        ),
        (
            "zsre_efficacy",
            [ZSRE[0] | {"answers": "Illinois"}],
            "edit 0 of the file: answers is 'Illinois'; expected a list. Put it in brackets.",
        ),
        *(
            (
                "zsre_efficacy",
                [ZSRE[0] | {"answers": answers}],
                r"edit 0 of the file: it asks 'What .*', and its answers are \[.*\]; expected a question and a list of texts, each "
                "more than articles and punctuation. Fill them in.",
            )
            for answers in ([], [""], ["the"], ["Illinois", 7])
        ),
        ("zsre_paraphrase", [ZSRE[0] | {"rephrase": " "}], "it asks ' ', and its answers are .*; expected a question"),
        (
            "zsre_neighborhood",
            [ZSRE[0] | {"loc_ans": None}],
            r"its answers are \[None\]; expected a question and a list",
        ),
    ],
)
def test_a_file_that_is_missing_or_of_another_format_is_refused(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / f"{name.split('_')[0]}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        task_of(name, tmp_path)
