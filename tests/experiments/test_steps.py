"""The commands that studies run exist, with the options and keys that the studies pass; nothing is trained or measured."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from experiments import steps
from material.elements import FACTS_FILE, QUESTIONS_FILE
from midus_hf.cli.entry_points import COMMANDS
from midus_hf.cli.recipes import read_recipe
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.sft.options import SftConfig
from midus_hf.training.options import TrainConfig

RUNS = {"midus train": TrainConfig, "midus sft": SftConfig}
EVALUATED = {
    "perplexity": {"perplexity": 2.0},
    "tasks": {
        "atomic_numbers": {"exact_match,first-integer": 0.5},
        "piqa": {"acc_norm": 0.5},
        "openbookqa": {"acc_norm": 0.5},
    },
}


def run_command(command: str, *arguments) -> str:
    """Read the arguments of a command as the command does, write what later steps of a study read, and return what they read."""
    line = list(map(str, arguments))
    if command in RUNS:
        options = read_recipe(RUNS[command], line[0], line[1:])
        output, last = Path(options.output_dir), options.max_steps or 0
        saved = range(0, last, options.save_steps) if options.save_steps else ()
        for folder in (output, *(output / f"checkpoint-{step}" for step in saved)):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
        (output / "log.jsonl").write_text('{"train_runtime": 1.0}\n')
        return ""
    module = "upscale" if command == "upscale" else COMMANDS[command.split()[1]]
    reader = typer.main.get_command(importlib.import_module(f"midus_hf.cli.{module}").app)
    if command == "midus cluster":
        reader = reader.commands[line.pop(0)]
    options = reader.make_context(command, line).params
    if command == "midus eval":
        keys = {setting.partition("=")[0] for setting in options["set_"] or ()}
        assert keys <= {field.name for field in dataclasses.fields(EvaluationSettings)}
        return json.dumps({"models": [EVALUATED]})
    output = Path(options["output"])
    if output.suffix == ".jsonl":
        output.write_text(Path(options["corpus"]).read_text())
    else:
        output.mkdir(parents=True)
        (output / "upscale.json").write_text(json.dumps({"parameters": {"trainable": 1, "fetched": 1, "bank": 1}}))
        (output / "tree.json").write_text('{"branching": 2}')
        (output / "config.json").write_text("{}")
    return ""


@pytest.fixture
def material(tmp_path):
    """Return stand-ins of the models and texts that studies use, by the name of the function that returns each."""
    rows = [{"name": f"e{number}", "number": number, "text": "x" * 300} for number in range(20)]
    for name in (FACTS_FILE, QUESTIONS_FILE, "rows.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "config.json").write_text("{}")
    texts = SimpleNamespace(train=tmp_path, held_out=tmp_path / "rows.jsonl")
    files = dict.fromkeys(("articles", "glosses"), tmp_path / "rows.jsonl")
    folders = dict.fromkeys(("smollm2_135m", "minilm", "elements", "benchmarks"), tmp_path)
    return {**files, **folders, "addresses": texts, "chats": texts}


@pytest.mark.parametrize("name", ["atoms", "depth_from_scratch", "from_scratch", "retention", "topics"])
def test_commands_of_a_study_are_read(name, material, tmp_path, monkeypatch, capsys):
    study = importlib.import_module(f"experiments.{name}")
    for module in (steps, study):
        if hasattr(module, "run_command"):
            monkeypatch.setattr(module, "run_command", run_command)
    for function in material.keys() & vars(study).keys():
        monkeypatch.setattr(study, function, lambda function=function: material[function])
    if hasattr(study, "small_tokenizer"):
        monkeypatch.setattr(study, "small_tokenizer", lambda folder, *_: folder)
    monkeypatch.setattr(sys, "argv", [name, "--work", str(tmp_path / "work"), "--no-append"])
    study.main()
    assert capsys.readouterr().out.count("\n|") > 2
