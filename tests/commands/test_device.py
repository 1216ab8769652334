"""Every command that takes a device refuses one that is not there, before it loads a model."""

import importlib
from collections.abc import Iterator

import pytest
import typer
from commands.installed import run_in_process

from midus_hf.cli.entry_points import COMMANDS

# Loading it would be refused in other words.
MODEL = "model"
# A request of each that lacks nothing but the device and the model.
WORDS = {
    "midus eval": [MODEL, "--text", "text.txt"],
    "midus look usage": [MODEL, "--text", "text.txt"],
    "midus look depth": [MODEL, "--text", "text.txt"],
    "midus look ablation": [MODEL, "--text", "text.txt"],
    "midus look drift": [MODEL, "--text", "text.txt", "--base", MODEL],
    "midus look values": [MODEL, "--layers", "1", "--slots", "1"],
    "midus look heads": [MODEL, "--tasks", "piqa"],
    "midus look page": [MODEL, "--text", "text.txt", "--base", MODEL, "--output", "page.html"],
    "midus cluster build": [
        *("--corpus", "text.txt", "--embedding-model", MODEL, "--tokenizer", MODEL, "--output", "tree")
    ],
    "midus cluster assign": ["--tree", "tree", "--corpus", "text.txt", "--output", "paths.jsonl"],
}


def commands_with_a_device() -> Iterator[str]:
    for name, module in COMMANDS.items():
        whole = typer.main.get_command(importlib.import_module(f"midus_hf.cli.{module}").app)
        subjects = getattr(whole, "subjects", {})
        for subject, each in subjects.items():
            if "device" in each.takes:
                yield f"midus {name} {subject}"
        for subcommand, part in {"": whole, **getattr(whole, "commands", {})}.items():
            if not subjects and any(option.name == "device" for option in part.params):
                yield f"midus {name} {subcommand}".strip()


def test_the_table_has_every_command_that_takes_a_device():
    assert set(commands_with_a_device()) == set(WORDS)


@pytest.mark.parametrize("command", WORDS)
def test_a_device_that_is_not_there_is_2_and_one_line_before_a_model_is_loaded(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda *names, **options: None)
    assert run_in_process(command, [*WORDS[command], "--device", "cuda:99"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "device is 'cuda:99', which cannot be used here (" in err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "text.txt"}
