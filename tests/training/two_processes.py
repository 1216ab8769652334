"""Runs of `midus-train` that two processes share, models for them, and what is compared with runs of one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from processes.warm import run_ranks
from safetensors.torch import load_file
from tiny import save_tiny_model
from training.tiny_run import tiny_tokenizer

from midus_hf.training.run.training_log import read_log
from upscalers.runs.upscale import upscale

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_cpt.py"
ULTRAMEM = {"n": 16, "k": 2, "share": "ring:2", "heads": 2}
METHODS: dict[str, dict[str, Any]] = {
    "llama-pro": {"num_new_layers": 2},
    "midus-hml": {"num_new_layers": 2, "options": {"n": 8, "k": 2}},
    "ultramem-v2": {"options": ULTRAMEM},
}
"""Of new layers that are dense, of head-wise memory, of memory beside layers of the base that shares a table."""


def save_method(method: str, folder: Path) -> Path:
    """Save a tiny model that a method made."""
    base = save_tiny_model("llama", folder / "base")
    upscale(base=base, method=method, output=folder / "model", verify=False, **METHODS[method])
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def save_tied(folder: Path) -> Path:
    """Save a tiny model with memory, in bfloat16, whose output projection is its embedding."""
    base = save_tiny_model("qwen2", folder / "base", torch.bfloat16)
    upscale(base=base, method="midus-hml", output=folder / "model", verify=False, **METHODS["midus-hml"])
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def write_recipe(path: Path, model: Path, corpus: Path, **options: Any) -> Path:
    """Write a run of 6 steps with rates that move a tiny model."""
    chosen = {
        "sequence_length": 16,
        "batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "log_every": 1,
        "model": model,
        "corpus": corpus,
        **options,
    }
    path.write_text("".join(f"{name}: {value}\n" for name, value in chosen.items()))
    return path


def in_two_processes(recipe: Path, *words: str, script: Path = SCRIPT, **environment: str) -> str:
    """Run a recipe in two processes; what they wrote to standard error."""
    run = run_ranks(script, recipe, *words, **environment)
    assert run.returncode == 0, run.stderr
    return run.stderr


def logged(output: Path, name: str) -> list[float]:
    return [event[name] for event in read_log(output / "log.jsonl") if name in event]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def assert_same_run(one: Path, other: Path, names: Sequence[str] = ("loss", "grad_norm")) -> None:
    """Bit by bit: what was logged under these names, and the models."""
    for name in names:
        assert logged(one, name) == logged(other, name) and logged(one, name)
    of_one, of_other = weights(one), weights(other)
    assert of_one.keys() == of_other.keys()
    assert [name for name in of_one if not torch.equal(of_one[name], of_other[name])] == []


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all numbers of two models."""
    assert found.keys() == expected.keys()
    return max((found[name] - tensor).abs().max().item() for name, tensor in expected.items())
