"""The example scripts train a model as they are, with the arguments that their docstrings show."""

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from training.tiny_run import NEW_LAYERS, save_native, save_upscaled, tiny_tokenizer, write_corpus
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def model(tmp_path, request):
    """Save a small upscaled model with a tokenizer in the working directory's folder `upscaled`; a test may ask for a dense one."""
    is_dense = getattr(request, "param", "") == "dense"
    folder = save_native("llama", tmp_path / "upscaled") if is_dense else save_upscaled("llama", tmp_path)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(script, model, monkeypatch, **changes) -> None:
    """Run a script with the arguments of its docstring, some of them replaced."""
    docstring = ast.get_docstring(ast.parse((SCRIPTS / script).read_text()))
    (command,) = re.findall(rf"python scripts/{script} ((?:.*\\\n)*.*)\n", docstring)
    words = shlex.split(command.replace("\\\n", " "))
    words = words[:-1] if words[-1] == "--bf16" else words
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    pairs |= {"--model_name_or_path": str(model), "--report_to": "none", "--use_cpu": "true", **changes}
    monkeypatch.setattr(sys, "argv", [script, *(word for pair in pairs.items() for word in map(str, pair))])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def moved(before, after) -> set[str]:
    """Return the names of the tensors that differ between two checkpoints."""
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict() for folder in (before, after)
    )
    return {name for name in first if not torch.equal(first[name], second[name])}


@pytest.mark.parametrize("model", ["with memory", "dense"], indirect=True)
def test_the_script_for_pretraining_trains_the_added_layers_alone(model, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "texts")
    assert list(corpus.glob("*.txt")), "what the script's pattern names"
    sizes = {"--sequence_length": 16, "--max_steps": 3, "--logging_steps": 1, "--learning_rate": 1e-2}
    run("train_cpt.py", model, monkeypatch, **sizes)
    changed = moved(model, tmp_path / "trained")
    assert changed and all(any(f"layers.{layer}." in name for layer in NEW_LAYERS) for name in changed)
    is_dense = "dense" in request.node.name
    assert is_dense or any(name.endswith("memory.value_bank") for name in changed)


def test_the_script_for_chats_fine_tunes_the_whole_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"w{number} w4", "completion": " w5 w6"} for number in range(3, 11)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("train_sft.py", model, monkeypatch, **{"--max_length": 64, "--learning_rate": 1e-2, "--logging_steps": 1})
    changed = moved(model, tmp_path / "tuned")
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert any(name.endswith("memory.value_bank") for name in changed)


@pytest.mark.parametrize("script", ["train_cpt.py", "train_sft.py"])
def test_scripts_are_short_enough_to_copy(script):
    assert len((SCRIPTS / script).read_text().splitlines()) <= 60
