"""Questions that the harness would count as wrong for any model are refused, by file and line or by task and number."""

import json
from types import SimpleNamespace

import pytest
from evaluation.questions import QUESTIONS, write_questions
from training.tiny_run import refused

pytest.importorskip("lm_eval")

from lm_eval.api.task import ConfigurableTask

from midus_hf.evaluation.harness import Tasks, local_task_names
from midus_hf.evaluation.questions import check_labels

JAR, SUM, FISH = (QUESTIONS[name][0] for name in ("piqa", "mmlu", "boolq"))
NO_CHOICE = (
    r"line 2 of .*{}\.jsonl has the gold {}, which names none of its choices .*; expected a number from 0 to {}, or"
)
REFUSED = [
    *(
        ("piqa", {**JAR, "gold": gold}, NO_CHOICE.format("piqa", f"{gold!r}", 1))
        for gold in ("1", -1, 2, 1.0, None, "unscrew")
    ),
    ("boolq", {**FISH, "gold": "true"}, NO_CHOICE.format("boolq", "'true'", 1)),
    ("mmlu", {**SUM, "gold": 4}, NO_CHOICE.format("mmlu", "4", 3)),
    (
        "mmlu",
        {**SUM, "choices": ["1", "2", "3"]},
        r"line 2 of .*mmlu\.jsonl has the choices .*; expected 4 choices, none of",
    ),
    ("piqa", {**JAR, "choices": ["only"]}, r"line 2 of .* has the choices \['only'\]; expected two choices or more"),
    ("piqa", {**JAR, "choices": None}, r"line 2 of .* has the choices None; expected two choices or more"),
    (
        "boolq",
        {**FISH, "passage": ""},
        r"line 2 of .*boolq\.jsonl is .*, without passage; expected an object of JSON with",
    ),
    (
        "atomic_numbers",
        {"number": 1},
        r"line 2 of .*atomic_numbers\.jsonl is .*, without name; expected an object of JSON with",
    ),
]


@pytest.mark.parametrize(("name", "row", "message"), REFUSED)
def test_question_that_cannot_be_right_is_refused(name, row, message, tmp_path):
    sound = {"name": "Hydrogen", "number": 1} if name == "atomic_numbers" else QUESTIONS[name][0]
    (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(sound)}\n{json.dumps(row)}\n")
    with refused(message):
        Tasks([name], data=tmp_path)


def test_sound_questions_are_not_refused(tmp_path):
    write_questions(tmp_path)
    assert Tasks([name for name in local_task_names() if name in QUESTIONS], data=tmp_path).load()["tasks"]
    for name, row in (("piqa", {**JAR, "gold": JAR["choices"][1]}), ("boolq", {**FISH, "gold": True})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        Tasks([name], data=tmp_path).load()


class Choosing(ConfigurableTask):
    """A task of the harness with given labels for the choices "a" and "b"."""

    OUTPUT_TYPE, multiple_input = "multiple_choice", 0

    def __init__(self, *labels, process_results=None):
        self._config, self.labels = SimpleNamespace(process_results=process_results), labels

    eval_docs = property(lambda self: range(len(self.labels)))

    def doc_to_target(self, doc):
        return self.labels[doc]

    def doc_to_choice(self, doc):
        return ["a", "b"]


def test_labels_of_any_task_are_checked():
    for label in (-1, 2, "c", [0, 2]):
        with refused(r"question 3 of task 'own' has the gold -?.*, which names none of its choices \['a', 'b'\]"):
            check_labels("own", Choosing(1, "a", label))
        check_labels("own", Choosing(1, [0, 1], label), limit=2)
    check_labels("own", Choosing(7, process_results=len))
