"""Runs of `midus train` that two processes share, and what they have in common with runs of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training.outcomes import as_it_was_at, largest_difference, logged, moved, weights
from training.tiny_run import save_upscaled, write_recipe
from transformers import AutoModelForCausalLM

from midus_hf.cli.train import main

# Of new layers that are dense, of head-wise memory, of memory attached to layers of the base that shares a table.
METHODS = ("llama-pro", "midus-hml", "ultramem-v2")


def assert_shared_run_is_that_of_one(
    method: str, shared: Callable[..., Any], corpus: Path, folder: Path, tolerance: float = 1e-5, **options: Any
) -> None:
    """Train by words of a command in processes that share what one process holds whole, and compare with one process.

    It is done also at rates of their own for values and memories, with held-out text, and back to the best checkpoint.
    """
    if method == "midus-hml":
        options |= {"value_learning_rate": 3e-2, "memory_learning_rate": 2e-3}
    recipe = write_recipe(folder, save_upscaled("llama", folder, method), corpus, **options)
    words = [str(recipe), f"--eval_text={corpus}", "--eval_steps=2", "--save_steps=2", "--load_best_model_at_end=true"]
    one, two = folder / "one", folder / "two"
    assert main([*words, "--per_device_train_batch_size=4", f"--output_dir={one}"]) == 0
    shared(*words, f"--output_dir={two}")
    for name in ("loss", "eval_loss"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=tolerance), name
        assert logged(one, name), name
    AutoModelForCausalLM.from_pretrained(two)
    assert not list(two.glob("pytorch_model_fsdp*"))
    assert not list(two.glob("global_step*"))
    assert moved(folder / "model", two)
    assert largest_difference(two, folder / "model") > 1e-2
    if not options.get("bf16"):
        assert largest_difference(two, one) < 1e-4


def assert_tied_tensors_are_saved_once(shared: Callable[..., Any], corpus: Path, folder: Path) -> None:
    model = save_upscaled("qwen2", folder, dtype=torch.bfloat16)
    shared(write_recipe(folder, model, corpus, trainable="all"), f"--output_dir={folder / 'out'}")
    assert {tensor.dtype for tensor in weights(folder / "out").values()} == {torch.bfloat16}
    assert moved(model, folder / "out")
    assert largest_difference(folder / "out", model) > 1e-2
    trained = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert trained.dtype is torch.bfloat16
    assert trained.lm_head.weight is trained.get_input_embeddings().weight


def assert_shared_run_goes_on_exactly(shared: Callable[..., Any], corpus: Path, folder: Path) -> None:
    """Compare an undisturbed run with runs that were killed after its checkpoints, the last included."""
    recipe = write_recipe(folder, save_upscaled("llama", folder), corpus, save_steps=2, save_total_limit="null")
    whole = folder / "whole"
    shared(recipe, f"--output_dir={whole}")
    for step in (2, 6):
        output = as_it_was_at(step, whole, folder / str(step))
        shared(recipe, "--resume_from_checkpoint=true", f"--output_dir={output}")
        for name in ("loss", "grad_norm"):
            assert logged(output, name) == logged(whole, name)
            assert logged(output, name)
        assert moved(output, whole) == set(), step
