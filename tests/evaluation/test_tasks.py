"""Tasks: their prompts, their scores, whether a text has an answer, and what is said of tasks that do not exist."""

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

from midus_hf.evaluation.answers import has_answer, read_numbers

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
        ["B is A", "A is B", "no A", "no B"]),
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
    assert task.doc_to_text(document) == prompt and task.doc_to_choice(document) == continuations
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


# Rows of tasks, what a model writes, and whether it is right; what an answer is, tests below have.
WRITTEN = {
    ("atomic_numbers", 1): {
        " the number of protons,\nwhich is 74, not 75.": True, "74: W": True, " 183.84 for its weight and 74": True,
        " 1,074 or 74": False, " -74": False, "端口74\uff0c": True, " 75, or 74": False, " 174": False, " unknown": False, "": False},
    ("facts", 0): {
        " SAINT HELIER.": True, ' "the Saint Helier", which lies': True, " St. Helier. It is": True, " St Helier; and": True,
        " Saint Helier: in": True, " Saint Helier \u2013 a port": True, " Saint Helier\uff0c": True, " Saint Helier (Jersey)": True,
        " Saint Helier in Jersey": False, " Helier": False, " Jersey, then Saint Helier": False, "": False},
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
NO_ANSWERS = ("null", "[]", '"you"', "[1492]", '["you", "\u200b"]')
ODD_ROWS += [f'{{"question": "Who", "answers": {each}}}' for each in NO_ANSWERS]
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
    upscaled, data = save_upscaled(base, tmp_path / "upscaled"), write_questions(tmp_path / "questions")
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


# Texts, and answers that they have.
FOUND = [
    ("青隼网关由北仓团队维护。", "北仓团队"), ("ｶﾞｲﾄﾞです", "ガイド"), ("เมืองหลวงคือกรุงเทพมหานคร", "กรุงเทพ"), ("由abc维护", "abc"),
    ("수도는 서울입니다.", "서울"), ("Merlin은 무엇인가?", "Merlin"),  # particles
    ("端口8443\uff0c由", "8443"), ("포트 8443을 사용한다", "8443"), ("พอร์ต๘๔๔๓ค่ะ", "8443"), ("気温は-5度", "-5"),
    ("\uff13\uff0e\uff11\uff14です", "3.14"), ("\u0663\u066b\u0661\u0664", "3.14"),
    ("the STORAGE team", "Storage team"), ("Wim's", "wim"), ("l\u2019Ankara", "Ankara"), ("**Paris** and _Rome_", "rome"),
    ("Rome.The", "Rome"), ("Kyiv--the capital", "Kyiv"), ("St. Helier", "St Helier"), ("e\u0301t\u00e9", "été"),
    ("Straße", "STRASSE"), ("Kyi\u00adv\u200b\u00a0Oblast", "Kyiv Oblast"),
    ("1,000 people", "1000"), ("1000", "1,000"), ("12,34,567", "1234567"), ("1.234.567", "1234567"), ("1.000,5", "1000.5"),
    ("1'000", "1000"), ("1_000", "1000"), ("1\u202f000 km", "1000"), ("3,14", "3.14"), ("0,125", "0.125"), ("1.0", "1"),
    (".5", "0.5"), ("1e-06", "0.000001"), ("\u22125 °C", "-5"), ("-$5", "-5"), ("$5", "5"), ("5%", "5"), ("5th", "5"),
    ("3-5", "5"), ("COVID-19", "19"), ("80,443,8443", "443"), ("1,000kg", "1000kg"), ("10.0.0.1:8443", "8443"),
    ("at 10.0.0.1", "10.0.0.1"), ("agent 007", "007"),
    ("C++!", "c++"), ("C++17", "C++"), ("C/C++", "C"), ("ASP.NET", ".NET"), ("C#.", "C#"), ("A-, B", "A-"),
]  # fmt: skip
NOT_FOUND = [
    ("Annapolis", "Ann"), ("storages", "storage"), ("merlin_cache", "cache"), ("병원", "원"), ("กุ", "ก"), ("e\u0301", "e"),
    ("H2O", "2"), ("18443", "8443"), ("8443.5", "8443"), ("8,443", "443"), ("1,000 people", "1"), ("1,000 people", "0"),
    ("3.14", "3"), ("1,5", "5"), ("3.11.2", "3.11"), ("1.5GB", "5GB"), ("v1.5", "v1"), ("v1.5", "5"), ("10²", "10"),
    ("5万人", "5"), ("1e-6", "6"), ("1.0", "10"), ("3.14", "314"), ("-5", "5"), ("\u22125", "5"), ("-$5", "5"), ("5", "-5"),
    ("3-1", "31"), ("007", "7"), ("1" + 30 * "0" + "1", "1" + 30 * "0" + "2"),
    ("C++", "C"), ("C#", "C"), (".NET", "NET"), ("A-", "A"), ("Na+ ions", "Na"), ("m²", "m"), ("text", ""), ("text", "\u200b"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), FOUND + NOT_FOUND)
def test_text_has_an_answer(text, answer):
    assert has_answer(text, answer) == ((text, answer) in FOUND)


@pytest.mark.parametrize(("text", "answer", "starts", "is_whole"), [
    ("Saint Helier in Jersey", "Saint Helier", True, False),
    (' "the Saint Helier".', "saint helier", True, True),
    ("Hague", "The Hague", False, True),
    ("in Saint Helier", "Saint Helier", False, False),
    ("Grade A.", "A", False, False),
    ("A.", "A", True, True),
    ("1,000 people", "1000", True, False),
    ("北京市", "北京", True, False),
    ("Kyiv!", "Kyiv.", True, True),
])  # fmt: skip
def test_place_restricts_where_an_answer_is_found(text, answer, starts, is_whole):
    assert has_answer(text, answer, "start") == starts and has_answer(text, answer, "whole") == is_whole


def test_case_counts_if_asked():
    assert has_answer(" na", "Na", "start") and not has_answer(" na", "Na", "start", match_case=True)
    assert has_answer("1E3 Na", "Na", match_case=True) and has_answer("1E3", "1000", match_case=True)


def test_numbers_are_read_in_order_of_the_text():
    text = "the 11th of 12, 1,000.5 kg, -7, not 10.0.0.1, 007, v2 or 5万, but 80,443,8443 and 3km"
    assert [*map(float, read_numbers(text))] == [11, 12, 1000.5, -7, 80, 443, 8443, 3]
