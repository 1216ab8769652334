"""The `midus eval` command: what it prints, where, and its exit status."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation.byte_models import byte_tokenizer, perplexity, save_byte_model, save_upscaled
from evaluation.questions import write_questions
from processes.warm import run_warm
from training.tiny_run import refused
from transformers import AutoModelForCausalLM

from midus_hf.cli import evaluate as cli
from midus_hf.config.errors import install_extra
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.evaluation.evaluate import EvaluationSettings
from upscalers.runs.upscale import upscale

pytest.importorskip("lm_eval")
COMMAND = "import sys; from midus_hf.cli.evaluate import main; sys.exit(main())"
TEXT = "A text of the ordinary kind, for measuring. " * 10


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    save_byte_model("qwen2", folder / "base", max_position_embeddings=256)
    save_upscaled(folder / "base", folder / "upscaled")
    (folder / "text.txt").write_text(TEXT)
    write_questions(folder / "questions")
    return folder


@pytest.fixture
def ask(capsys):
    def run(*words):
        assert cli.main([*map(str, words)]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in words else printed

    return run


@pytest.fixture(scope="module")
def words(room) -> list[object]:
    return ["--text", room / "text.txt", "--sequence-length", 32]


@pytest.fixture(scope="module")
def asked_for_json(room, words, tmp_path_factory) -> subprocess.CompletedProcess:
    own = write_task(tmp_path_factory.mktemp("noisy"), noisy=True)
    tasks = [*own, "--tasks", "piqa, boolq", "--data", room / "questions", "--limit", 2, "--json"]
    return run_warm(COMMAND, room / "base", room / "upscaled", *words, *tasks, COLUMNS="120")


def test_json_is_the_only_standard_output(room, asked_for_json):
    done = asked_for_json
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    base, upscaled = report["models"]
    assert (base["model_type"], upscaled["model_type"]) == ("qwen2", "midus_qwen2")
    assert upscaled["parameters"] > base["parameters"]
    assert upscaled["tasks"] == base["tasks"]
    for measure in ("perplexity", "tokens"):
        assert upscaled["perplexity"][measure] == base["perplexity"][measure]
    assert base["perplexity"]["tokens"] == len(TEXT) - 1
    assert base["tasks"]["piqa"]["num_questions"] == 2
    assert list(base["tasks"]) == report["settings"]["tasks"] == ["mine", "piqa", "boolq"]
    model = AutoModelForCausalLM.from_pretrained(room / "base")
    expected = perplexity(model, byte_tokenizer(), [TEXT], sequence_length=32)
    assert base["perplexity"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    told = ("chatter", "a warning", "advice", "an error")
    assert all(f"{each} of a library" in done.stderr for each in told)
    assert "library" not in done.stdout
    assert all("of a library" in line for line in done.stderr.splitlines()), done.stderr


def test_table_compares_models_and_names_one_not_causal(room, words, tmp_path, ask):
    options = {"routing": "sequence", "memory_tokens": 16, "chapters": 4, "k": 2}
    upscale(base=room / "base", method="moc", output=tmp_path / "ahead", options=options, verify=False)
    models = ask(room / "base", tmp_path / "ahead", *words, "--json")["models"]
    assert [model["causal"] for model in models] == [True, False]
    printed = ask(room / "base", tmp_path / "ahead", *words)
    rows = dict(line.replace("│", "").split(maxsplit=1) for line in printed.splitlines() if line.startswith("│ p"))
    assert rows["parameters"].split() == [f"{model['parameters']:,}" for model in models]
    assert rows["perplexity"].split() == [f"{model['perplexity']['perplexity']:.4f}" for model in models]
    assert "Not causal: ahead." in " ".join(printed.split())
    (tmp_path / "base").symlink_to(room / "base")
    printed = ask(room / "base", tmp_path / "base", *words).replace("│", "").split()
    assert "causal" not in printed, "models of one name are told apart by their paths"
    assert "base" not in printed, "models of one name are told apart by their paths"


def save_with_token(token, folder) -> Path:
    save_byte_model("qwen2", folder, vocab_size=280)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(token)
    tokenizer.save_pretrained(folder)
    return folder


def test_models_of_different_tokenizers_are_compared_by_bytes(room, words, tmp_path, ask):
    models = [save_byte_model("qwen2", tmp_path / "bytes", vocab_size=280)]
    models.append(save_with_token("ordinary kind", tmp_path / "words"))
    report = ask(*models, *words, "--json")
    bytewise, longer = (model["perplexity"] for model in report["models"])
    assert longer["tokens"] == bytewise["tokens"] - 10 * (len("ordinary kind") - 1)
    for result in (bytewise, longer):  # the first token, a byte, is not predicted
        bits = math.log2(result["perplexity"]) * result["tokens"]
        assert result["bits_per_byte"] == pytest.approx(bits / (len(TEXT) - 1))
    printed = ask(*models, *words)
    rows = {line.replace("│", "").rsplit(maxsplit=2)[0].strip() for line in printed.splitlines() if "│" in line}
    assert {"bits per byte", "perplexity", "tokens predicted"} <= rows
    assert "per token, cannot be compared; bits per byte of the text (UTF-8) can." in " ".join(printed.split())
    assert "bits" not in ask(room / "base", room / "upscaled", *words), "the tokens are the same"
    longer["bits_per_byte"] = None  # as of a tokenizer that does not tell places
    assert [*cli.comparison_table(report).columns[2].cells][2] == "not known"


def test_windows_of_different_lengths_are_noted(room, tmp_path, ask):
    short = shutil.copytree(room / "base", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    asked = [room / "base", short, "--text", room / "text.txt"]
    note = "Windows have other numbers of tokens (base: 256, short: 16), so results cannot be compared: pass --sequence-length 16."
    assert note in " ".join(ask(*asked).split())
    assert "Windows" not in ask(*asked, "--sequence-length", 16)


def test_short_text_is_measured_whole_in_one_window(room, tmp_path, ask):
    save_with_token("short", tmp_path / "words")
    (tmp_path / "short.txt").write_text("A short text.")
    asked = [room / "base", tmp_path / "words", "--text", tmp_path / "short.txt"]
    results = [model["perplexity"] for model in ask(*asked, "--json")["models"]]
    assert [(result["tokens"], result["sequence_length"]) for result in results] == [(12, 12), (8, 8)]
    assert "Windows have other" not in " ".join(ask(*asked).split())


def test_column_of_a_folder_is_read_and_unread_files_are_noted(room, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(json.dumps({"body": "ü" + TEXT}, ensure_ascii=False).encode())
    for name in ("b.doc", "c.doc", "d.pdf"):
        (tmp_path / name).touch()
    words = ["--text", tmp_path, "--column", "body", "--sequence-length", 32, "--json"]
    cli.main([*map(str, (room / "base", *words))])
    printed = capsys.readouterr()
    assert f"text {str(tmp_path)!r}: 1 of 4 files are read; not read: 2 .doc, 1 .pdf" in printed.err.splitlines()
    measured = json.loads(printed.out)["models"][0]["perplexity"]
    assert measured["tokens"] == len(("ü" + TEXT).encode()) - 1


def test_options_override_settings_of_a_file(room, tmp_path, ask):
    (tmp_path / "a.yaml").write_text(f"text: {room / 'text.txt'}\nsequence_length: 16\nbatch_size: 2\n")
    report = ask(room / "base", "--config", tmp_path / "a.yaml", "--sequence-length", 32, "--json")
    assert report["models"][0]["perplexity"]["sequence_length"] == 32
    assert report["settings"]["batch_size"] == 2


def test_help_names_every_setting(ask):
    printed = ask("--help")
    assert "╭" not in printed
    named = {words[0] for line in printed.splitlines() if (words := line.split())}
    assert {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(EvaluationSettings)} <= named


def refusal(capsys, *arguments) -> tuple[int, str]:
    status, printed = cli.main([str(argument) for argument in arguments]), capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return status, next(line for line in printed.err.splitlines() if line.startswith("midus eval: "))


@pytest.mark.parametrize("measure", ["text", "tasks"])
def test_ids_beyond_the_embedding_are_refused(room, words, tmp_path, capsys, measure):
    save_byte_model("qwen2", tmp_path, max_position_embeddings=256, vocab_size=40)
    asked = {"text": words, "tasks": ("--tasks", "piqa", "--data", room / "questions")}
    status, line = refusal(capsys, tmp_path, *asked[measure])
    assert status == 2
    assert re.search(r"yields id \d+, but the model embeds 40 ids; use the tokenizer that", line)


def test_failed_work_gets_one_line_and_status_1(room, words, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(room / "base")
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    status, line = refusal(capsys, tmp_path, *words)
    assert status == 1
    assert "RuntimeError: the loss of text 'text' is not a finite number" in line


def test_missing_harness_names_the_extra_to_install(room, words, ask, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lm_eval.", "midus_hf.evaluation.harness"))]:
        monkeypatch.delitem(sys.modules, name)  # Python finds a loaded submodule without its package
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, line = refusal(capsys, room / "base", "--tasks", "piqa", "--data", room / "questions")
    assert status == 2
    assert line == f"midus eval: tasks need lm-evaluation-harness (lm_eval is missing); {install_extra('eval')}"
    assert ask(room / "base", *words, "--json")["models"][0]["tasks"] == {}, "perplexity needs none"


HELPER = """
import logging, warnings

def score(doc, results):
    if {noisy}:
        print("chatter of a library")
        warnings.warn("a warning of a library")
        logging.getLogger("library").warning("advice of a library")
        logging.getLogger("library").error("an error of a library")
    return {{"shininess": float(len(doc["q"])), "spread": len(doc["q"]), "worst": float("nan"), "kind": 1.0}}

def largest(items):
    return max(items)

def as_text(items):
    return "round"
"""
METRICS = ("shininess: mean", "spread: !function helper.largest", "worst: mean", "kind: !function helper.as_text")


def write_task(folder, noisy: bool = False) -> list[str]:
    """Write a task of the user's own with four questions; the words that ask for it."""
    (folder / "mine.jsonl").write_text("".join(json.dumps({"q": "?" * (i + 1)}) + "\n" for i in range(4)))
    (folder / "helper.py").write_text(HELPER.format(noisy=noisy))
    metrics = "".join(
        f"  - {{metric: {name}, aggregation: {how}, higher_is_better: true}}\n"
        for name, how in (metric.split(": ") for metric in METRICS)
    )
    (folder / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/mine.jsonl}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: [a, b]\ndoc_to_target: 0\n'
        f"process_results: !function helper.score\nmetric_list:\n{metrics}"
    )
    return ["--tasks", "mine", "--include-path", str(folder), "--device", "cpu"]


def test_every_metric_of_an_own_task_is_shown(room, tmp_path, ask):
    words = [room / "base", *write_task(tmp_path)]
    scores = ask(*words, "--json")["models"][0]["tasks"]["mine"]
    assert scores["shininess_stderr"] == pytest.approx(math.sqrt(5 / 3) / 2)
    shown = {"shininess": 2.5, "spread": 4, "worst": None, "kind": "round"}
    assert {name: scores[name] for name in shown} == shown
    assert not {"spread_stderr", "worst_stderr", "kind_stderr"} & scores.keys()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ask(*words).splitlines()]
    printed = {row[0]: row[1] for row in rows if row}
    shown = {"shininess": "2.5000 ± 0.6455", "spread": "4.0000", "worst": "not finite", "kind": "round"}
    assert {name: printed[f"mine {name} (0-shot)"] for name in shown} == shown
    assert not any("stderr" in measure or "num_" in measure for measure in printed)


RECIPES = sorted((Path(__file__).parents[2] / "configs" / "eval").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_read(recipe):
    settings = from_mapping(EvaluationSettings, {**read_mapping(recipe), "text": "text.txt"})
    assert settings.tasks
    assert settings.text == "text.txt"


@pytest.mark.parametrize(("options", "message"), [
    ({}, "there is nothing to measure; give a text, tasks, or both"),
    ({"tasks": ["piqa"], "max_tokens": 4}, "max_tokens is 4, but there is no text to measure; give one"),
    ({"tasks": ["piqa"], "path_column": "i"}, "path_column is 'i', but there is no text to measure"),
    ({"text": "a", "limit": 4}, "limit is 4, but there is no task to run; give one, or leave it out"),
    ({"text": "a", "retriever": "tree", "path_column": "i"}, "path_column is 'i', but a retriever is given; ex"),
])  # fmt: skip
def test_contradicting_settings_are_refused(options, message):
    with refused(message):
        EvaluationSettings(**options)
