"""Tasks: their prompts, scores and refusals, and measures by the blocks of each document."""

import inspect
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from evaluation.byte_models import byte_model, byte_tokenizer, perplexity, save_byte_model, save_upscaled
from evaluation.questions import QUESTIONS, write_questions
from look.upscaled_folders import loaded, saved_with_bank
from models.fresh_process import run_python
from topics.tiny_bert import WIDTH
from topics.trees import random_tree
from training.tiny_run import refused
from transformers import AutoModelForCausalLM

from midus_hf.cli.evaluate import main
from midus_hf.evaluation.fetching import fetches_blocks, fetching
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import TreeOrigin

pytest.importorskip("lm_eval")

from lm_eval import evaluator
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.utils import set_torch_seed

from midus_hf.evaluation.harness import FetchingLM, Tasks, load_local_task, question_of

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
    assert state == [expected]
    assert seeds["fewshot_random_seed"].default == DEFAULT_OTHER_SEED


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


# Rows of tasks, what a model writes, and whether it is right; what an answer is, test_text_rows.py has.
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
    """Of only one of its tasks: it takes seconds to look through the files of all."""
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


DOCUMENTS = ["The sky is blue, and the sea is deep.", "Lions eat.", "x", "Two and two are four; so they say. " * 3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny `model` whose bank has blocks that act, and a `tree` of 3 by 9 for it."""
    folder = tmp_path_factory.mktemp("fetching")
    return saved_with_bank(save_byte_model("llama", folder / "base"), folder)


@pytest.fixture(scope="module")
def model(saved):
    return loaded(saved.model)


def find_paths(texts):
    leaves = torch.tensor([sum(map(ord, text)) % 9 for text in texts])
    return torch.stack([leaves // 3, leaves], dim=1)


def loss_of(model, document: str, window: int, memory_ids=None) -> tuple[float, int]:
    """Negative log-likelihood of a document by itself, window by window, in nats; and its tokens."""
    ids, total = torch.tensor(byte_tokenizer()(document, add_special_tokens=False).input_ids), 0.0
    for first in range(1, len(ids), window):
        stretch = ids[first - 1 : first + window]
        arguments = {} if memory_ids is None else {"memory_ids": memory_ids}
        with torch.no_grad():
            logits = model(stretch[None, :-1], use_cache=False, **arguments).logits[0].double()
        total -= logits.log_softmax(-1).gather(1, stretch[1:, None]).sum().item()
    return total, max(len(ids) - 1, 0)


@pytest.mark.parametrize("window", [8, 16])
def test_perplexity_is_of_documents_with_their_own_blocks(model, window):
    how = {"sequence_length": window, "apart": True}
    result = perplexity(model, byte_tokenizer(), DOCUMENTS, find_paths=find_paths, batch_size=3, **how)
    parts = [loss_of(model, document, window, find_paths([document])) for document in DOCUMENTS]
    assert result.tokens == sum(count for _, count in parts)
    assert result.perplexity == pytest.approx(math.exp(sum(loss for loss, _ in parts) / result.tokens), rel=1e-5)
    without = perplexity(model, byte_tokenizer(), DOCUMENTS, **how)
    parts = [loss_of(model, document, window) for document in DOCUMENTS]
    assert without.perplexity == pytest.approx(math.exp(sum(loss for loss, _ in parts) / result.tokens), rel=1e-5)
    assert abs(without.perplexity - result.perplexity) > 1e-3 * without.perplexity


def test_every_call_within_the_context_fetches_the_path(model):
    tokens = torch.arange(1, 9)[None].expand(3, -1)
    with torch.no_grad():
        expected = model(tokens, memory_ids=torch.tensor([[1, 4]] * 3)).logits
        with fetching(model, (1, 4)):
            assert torch.equal(model(tokens).logits, expected)
            assert torch.equal(model(input_ids=tokens).logits, expected)
        assert not torch.equal(model(tokens).logits, expected)
    assert fetches_blocks(model)
    assert not fetches_blocks(byte_model("llama"))


def test_paths_are_of_questions_without_worked_examples(model, tmp_path):
    tasks, requests = Tasks(["openbookqa", "piqa"], data=write_questions(tmp_path / "questions")), []

    def spy(texts):
        requests.extend(texts)
        return find_paths(texts)

    result = tasks.run(model, byte_tokenizer(), find_paths=spy, num_fewshot=1)
    assert result["openbookqa"]["num_fewshot"] == 1
    assert requests
    assert all("Answer: " not in text and len(text) < 60 for text in requests)
    assert "Predators eat" in requests


def test_likelihoods_are_those_of_the_blocks_of_the_context(model):
    language_model = FetchingLM(model, find_paths, tokenizer=byte_tokenizer(), batch_size=2)
    asked = [("sky is", " blue"), ("lions", " eat"), ("sky is", " up"), ("j", "a")]
    requests = [SimpleNamespace(args=words, task_name="task", doc={}) for words in asked]
    actual = language_model.loglikelihood(requests, disable_tqdm=True)
    for request, (value, _) in zip(requests, actual, strict=True):
        context, continuation = (byte_tokenizer()(text, add_special_tokens=False).input_ids for text in request.args)
        tokens = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = model(tokens[:, :-1], memory_ids=find_paths([request.args[0]])).logits[0].double()
        targets = tokens[0, len(context) :, None]
        expected = logits.log_softmax(-1)[len(context) - 1 :].gather(1, targets).sum().item()
        assert value == pytest.approx(expected, rel=1e-4)


def test_question_is_what_contexts_have_in_common():
    contexts = [f"The trophy does not fit since the {name}" for name in ("trophy", "case")]
    told = {"doc_to_text": 1, "doc_to_choice": contexts, "doc_to_target": "is too large."}
    task = SimpleNamespace(**{name: lambda _, words=words: words for name, words in told.items()})
    assert question_of(task, {}) == "The trophy does not fit since the is too large."


def write_rows(path, *rows) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--text", str(path), "--sequence-length", "16", "--json"]


def test_command_measures_by_a_tree(saved, model, tmp_path, capsys):
    texts = [f"w{i} w{i + 1} w{2 * i} " * 4 for i in range(6)]
    words = [str(saved.model), *write_rows(tmp_path / "texts.jsonl", *({"text": text} for text in texts))]
    main([*words, "--retriever", str(saved.tree)])
    told = capsys.readouterr()
    measured = json.loads(told.out)["models"][0]["perplexity"]["perplexity"]
    assert "no block" not in told.err
    main(words)
    line = f"{saved.model}: no block of its bank was read, since the topics of the texts are not known"
    assert line in capsys.readouterr().err
    paths, arguments = MemoryRetriever.load(saved.tree).paths, {"sequence_length": 16, "apart": True}
    expected = perplexity(model, byte_tokenizer(), texts, find_paths=paths, **arguments).perplexity
    assert measured == pytest.approx(expected, rel=1e-6)
    assert perplexity(model, byte_tokenizer(), texts, **arguments).perplexity != pytest.approx(expected, rel=1e-3)


def test_command_measures_by_the_paths_of_rows(saved, model, tmp_path, capsys):
    paths = find_paths(DOCUMENTS).tolist()
    rows = [{"text": text, "memory_ids": path} for text, path in zip(DOCUMENTS, paths, strict=True)]
    rows.insert(2, {"text": " ", "memory_ids": None})  # no document, so nobody asks for its path
    plain, words = save_byte_model("llama", tmp_path / "plain"), write_rows(tmp_path / "texts.jsonl", *rows)
    main([str(saved.model), str(plain), *words, "--path-column", "memory_ids"])
    fetched, alike = (report["perplexity"]["perplexity"] for report in json.loads(capsys.readouterr().out)["models"])
    arguments = {"sequence_length": 16, "apart": True}
    expected = perplexity(model, byte_tokenizer(), DOCUMENTS, find_paths=find_paths, **arguments)
    assert fetched == pytest.approx(expected.perplexity, rel=1e-6)
    without = perplexity(model, byte_tokenizer(), DOCUMENTS, **arguments)
    assert abs(without.perplexity - fetched) > 1e-3 * fetched
    expected = perplexity(loaded(plain), byte_tokenizer(), DOCUMENTS, **arguments)
    assert alike == pytest.approx(expected.perplexity, rel=1e-6)


@pytest.mark.parametrize(("branching", "levels"), [(2, 2), (3, 3)], ids=["fewer-children", "more-levels"])
def test_tree_of_another_shape_is_refused(branching, levels, saved, tmp_path, capsys):
    """By fewer children every node has a block, of other topics."""
    origin = TreeOrigin(embedding_model=str(saved.bert))
    random_tree(branching, levels, width=WIDTH, origin=origin).save(tmp_path / "tree")
    words = write_rows(tmp_path / "texts.jsonl", {"text": "w1 w2 w3"})
    assert main([str(saved.model), *words, "--retriever", str(tmp_path / "tree")]) == 2
    said = capsys.readouterr().err
    assert f"has {levels} levels of {branching}, and memory 'hier-ffn' fetches blocks by a tree of 2 levels of" in said
    assert "expected one tree. Give the one that the bank was trained with, or build one." in said


def test_paths_in_another_tree_are_refused_before_measuring(saved, tmp_path, capsys, monkeypatch):
    measured: list[object] = []
    monkeypatch.setattr("midus_hf.evaluation.text_rows.row_losses", lambda *_, **__: measured.append(1))
    rows = [*({"text": "a word " * 50, "memory_ids": [0, 0]} for _ in range(20)), {"text": "b", "memory_ids": [2, 9]}]
    words = write_rows(tmp_path / "texts.jsonl", *rows)
    assert main([str(saved.model), *words, "--path-column", "memory_ids"]) == 2
    message = "column 'memory_ids' of the text has 9 for level 2 in row 20; expected 0 to 8, or a row of -1"
    assert message in capsys.readouterr().err
    assert not measured
