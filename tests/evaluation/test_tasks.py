"""Tasks: their prompts, their scores, and what is said of those that do not exist."""

import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from evaluation.byte_models import byte_model, byte_tokenizer, save_byte_model, save_upscaled
from evaluation.questions import QUESTIONS, write_questions
from models.fresh_process import run_python
from training.tiny_run import refused
from transformers import AutoModelForCausalLM

pytest.importorskip("lm_eval")

from lm_eval import evaluator
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.utils import set_torch_seed

from midus_hf.evaluation.harness import Tasks, load_local_task

PROMPTS = {
    "piqa": ("Question: Open a jar\nAnswer:", ["Twist the lid.", "Shout at it."]),
    "openbookqa": ("Predators eat", ["lions", "humans", "bunnies", "grass"]),
    "commonsenseqa": ("Question: Where is a book?\nA. sea\nB. sky\nC. shelf\nD. stove\nE. soup\nAnswer:", ["A", "B", "C", "D", "E"]),
    "boolq": ("Sky -- It is blue.\nQuestion: is the sky blue?\nAnswer:", ["no", "yes"]),
    "logiqa": (
        "Passage: A is B.\nQuestion: So?\nChoices:\nA. B is A\nB. A is B\nC. no A\nD. no B\nAnswer:",
        ["B is A", "A is B", "no A", "no B"],
    ),
    "mmlu": ("2 + 2 =\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", ["A", "B", "C", "D"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions"))


def task_of(name, data):
    (task,) = Tasks([name], data=data).load()["tasks"].values()
    return task


def states_of_generators() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_seeds_are_the_defaults_of_the_harness(data, monkeypatch):
    """Which its signature has; the state of each generator is that after the harness's own seeding."""
    seeds = inspect.signature(evaluator.simple_evaluate).parameters
    random.seed(seeds["random_seed"].default)
    np.random.seed(seeds["numpy_random_seed"].default)
    set_torch_seed(seeds["torch_random_seed"].default)
    expected, state = states_of_generators(), []

    def note(self, specs):
        state.append(states_of_generators())
        raise InterruptedError

    monkeypatch.setattr(TaskManager, "load", note)
    with pytest.raises(InterruptedError):
        Tasks(["piqa"], data=data).run(byte_model("llama"), byte_tokenizer())
    assert state == [expected] and seeds["fewshot_random_seed"].default == DEFAULT_OTHER_SEED


@pytest.mark.parametrize("name", PROMPTS)
def test_local_task_asks_as_the_harness_does(name, data):
    task = task_of(name, data)
    document = task.test_docs()[0]
    prompt, continuations = PROMPTS[name]
    assert task.doc_to_text(document) == prompt
    assert task.doc_to_choice(document) == continuations
    assert task.doc_to_target(document) == QUESTIONS[name][0]["gold"]
    requests = task.construct_requests(document, prompt, metadata=(f"midus_{name}", 0, 1))
    assert [request.args for request in requests] == [(prompt, f" {text}") for text in continuations]


@pytest.mark.parametrize(
    ("name", "row", "prompt", "until"),
    [
        ("atomic_numbers", 1, "The atomic number of tungsten is", []),  # the words of the paper
        ("facts", 0, "The ship sailed from the port of", ["\n"]),
    ],
)
def test_fact_is_asked_as_its_row_says_and_written_greedily(data, name, row, prompt, until):
    task = task_of(name, data)
    document = task.test_docs()[row]
    assert task.doc_to_text(document) == prompt
    if name == "facts":
        assert task.doc_to_target(document) == QUESTIONS[name][row]["answers"]
    request = task.construct_requests(document, prompt, metadata=(f"midus_{name}", 0, 1))
    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}  # whatever the model's own settings are
    assert request.args == (prompt, {"until": until, **greedy, "max_gen_toks": 16})


# Rows of tasks, what a model writes, and whether it is right; what an answer is, test_answers.py has.
WRITTEN = {
    ("atomic_numbers", 1): {
        " the number of protons,\nwhich is 74, not 75.": True, "74: W": True, " 183.84 for its weight and 74": True,
        " 1,074 or 74": False, " -74": False, "端口74\uff0c": True, " 75, or 74": False, " 174": False, " unknown": False, "": False,
    },
    ("facts", 0): {
        " SAINT HELIER.": True, ' "the Saint Helier", which lies': True, " St. Helier. It is": True, " St Helier; and": True,
        " Saint Helier: in": True, " Saint Helier \u2013 a port": True, " Saint Helier\uff0c": True, " Saint Helier (Jersey)": True,
        " Saint Helier in Jersey": False, " Helier": False, " Jersey, then Saint Helier": False, "": False,
    },
    ("facts", 1): {" .je": True, " je.": False, " .jersey": False, " .je.ne": False},
}  # fmt: skip
# Answers, what a model writes, and whether it is right.
JUDGED = [
    ("5", "-5", False), ("-5", "-5; or", True), ("1", "1,000 people", False), ("1000", "1,000", True), ("2.4", "2.4.", True),
    ("10", "10:30", False), ("北京", "北京\uff0c中国的首都", True), ("Kyiv", "Kyiv,the capital", True), ("the", "A", False),
    ("Washington", "Washington, DC, USA", True), ("Washington, DC", "Washington, DC, USA", True),
    ("Kyiv (Kiev)", "Kyiv (Kiev), the capital", True),
]  # fmt: skip


def score(task, name, document, written) -> float:
    """Return whether what a model writes is right, as the task says."""
    request = task.construct_requests(document, "", metadata=(f"midus_{name}", 0, 1))
    request.resps, task._instances = [written], [request]
    task.apply_filters()
    return task.process_results(document, [request.filtered_resps["none"]])["exact_match"]


@pytest.mark.parametrize(("answer", "written", "right"), JUDGED)
def test_clause_that_is_the_answer_is_right(answer, written, right, tmp_path):
    row = {"question": "It is", "answers": ["another", answer]}
    (tmp_path / "facts.jsonl").write_text(json.dumps(row))
    assert score(task_of("facts", tmp_path), "facts", row, f" {written}") == right


@pytest.mark.parametrize(("name", "row"), WRITTEN)
def test_first_whole_number_or_clause_counts(data, name, row):
    task, expected = task_of(name, data), WRITTEN[name, row]
    document = task.test_docs()[row]
    assert {written: score(task, name, document, written) for written in expected} == expected


# Tasks whose choices are also scored by their length.
BY_LENGTH_TOO = {"piqa", "openbookqa", "logiqa"}


def test_local_tasks_are_zero_shot_and_scored_by_their_metrics(data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # where there is no repository, of which git would tell
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", None)
    model = byte_model("llama", max_position_embeddings=256)
    scores = Tasks([*QUESTIONS], data=data).run(model, byte_tokenizer())
    assert "git" not in capfd.readouterr().err
    assert {name: (score["num_fewshot"], score["num_questions"]) for name, score in scores.items()} == {
        name: (0, len(rows)) for name, rows in QUESTIONS.items()
    }
    assert scores["atomic_numbers"]["exact_match"] == 0.0  # of random weights
    assert scores["facts"]["exact_match"] == 0.0
    for name in PROMPTS:
        assert {"acc", "acc_norm"} & scores[name].keys() == {"acc", *(["acc_norm"] if name in BY_LENGTH_TOO else [])}


DATES = ["2004-01-25", "1937-05-27", "1986-02-09T10:00:00Z"]


def test_answers_and_choices_that_look_like_dates_are_text(tmp_path):
    rows_of = {
        "facts": [{"question": "When", "answers": [date]} for date in DATES],
        "piqa": [{"question": date, "choices": [date, "4"], "gold": 0} for date in DATES],
    }
    for name, rows in rows_of.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = task_of(name, tmp_path)
        assert list(task.test_docs()) == rows
        assert task.doc_to_target(rows[0]) == (DATES[:1] if name == "facts" else 0)
        assert name != "facts" or score(task, name, rows[0], f" {DATES[0]}.")


def test_task_of_the_harness_is_found_by_name(monkeypatch):
    """Of one of its tasks alone: it takes seconds to look through the files of all."""
    folder = Path(evaluator.__file__).with_name("tasks") / "hellaswag"
    own = TaskManager(include_defaults=False, include_path=str(folder))
    monkeypatch.setattr("midus_hf.evaluation.harness._own_tasks", lambda: own)
    assert Tasks(["hellaswag"]).specs == ["hellaswag"]


FACT = '{"question": "Who", "answers": ["you"]}\n\n'
NO_FACT = r"line 3 of .*facts\.jsonl is .*; expected an object of JSON with question, a text, and answers"
ODD_ROWS = ["{broken", "[]", '{"question": " ", "answers": ["you"]}']
ODD_ROWS += [
    f'{{"question": "Who", "answers": {each}}}' for each in ("null", "[]", '"you"', "[1492]", '["you", "\u200b"]')
]
NO_TEXT = {
    "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n": "is a Git LFS pointer, not the file",
    '{"question": "Who", "answers": ["Ren\u00e9"]}\n': "not UTF-8, perhaps Windows-1252. Save it as UTF-8",
}
# A task, what its file holds (nothing: there is no file; None: there is no folder of questions), and what is said.
REFUSED = [
    *(("facts", FACT + row, NO_FACT) for row in ODD_ROWS),
    *((name, content, message) for name in ("facts", "piqa") for content, message in NO_TEXT.items()),
    ("piqa", "", r"has no piqa\.jsonl; expected a row of JSON per question"),
    ("pica", "", r"task is 'pica'; expected a task of lm-eval .* one of atomic_numbers, .*piqa"),
    ("facts", None, r"task is 'facts'; .* with the folder of their questions as data, one of"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_unreadable_task_is_refused_before_loading(name, content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("midus_hf.evaluation.harness._own_tasks", lambda: TaskManager(include_defaults=False))
    if content:
        (tmp_path / f"{name}.jsonl").write_bytes(content.encode("utf-8" if "\u200b" in content else "cp1252"))
    with refused(message):
        Tasks([name], data=None if content is None else tmp_path)


# Without lists of packages and compilers, and without the harness's own tasks, whose files take ten seconds to read.
_LM_EVAL = """
import sys
from functools import partialmethod
sys.argv = ["lm_eval", *{arguments!r}]
from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
evaluator.add_env_info = lambda results: None
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
assert "midus_hf" not in sys.modules
"""


def test_plain_lm_eval_scores_a_saved_model_without_this_project(tmp_path):
    base = save_byte_model("gemma3", tmp_path / "base", max_position_embeddings=256)
    upscaled = save_upscaled(base, tmp_path / "upscaled")
    data = write_questions(tmp_path / "questions")
    (tmp_path / "tasks").mkdir()
    for name in ("piqa", "boolq"):
        (tmp_path / "tasks" / f"midus_{name}.yaml").write_text(yaml.safe_dump(load_local_task(name, data)))
    arguments = ["run", "--model", "hf", "--model_args", f"pretrained={upscaled},trust_remote_code=True"]
    arguments += ["--tasks", "midus_piqa,midus_boolq", "--include_path", str(tmp_path / "tasks")]
    arguments += ["--device", "cpu", "--output_path", str(tmp_path / "scores.json")]
    run_python(_LM_EVAL.format(arguments=arguments), tmp_path, package_present=False)

    (written,) = tmp_path.glob("scores*.json")
    results = json.loads(written.read_text())["results"]
    expected = Tasks(["piqa", "boolq"], data=data).run(AutoModelForCausalLM.from_pretrained(base), byte_tokenizer())
    for task, metric in (("piqa", "acc"), ("piqa", "acc_norm"), ("boolq", "acc")):
        assert results[f"midus_{task}"][f"{metric},none"] == expected[task][metric]
