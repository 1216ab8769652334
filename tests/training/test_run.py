"""A run trains what it should, leaves the rest as it was, and can be resumed exactly."""

import json

import pytest
import torch
from pairs import by_default
from tiny import FAMILIES
from training.outcomes import assert_resumes, assert_same_run, exact_log, logged, moved, weights
from training.steered_runs import cut_off
from training.tiny_run import NEW_LAYERS, save_upscaled
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.training.run.train import prepare, train


def is_new(name: str) -> bool:
    return any(name.startswith(f"model.layers.{layer}.") for layer in NEW_LAYERS)


@pytest.mark.parametrize("family", by_default(["llama", "gemma3"], FAMILIES))
def test_a_resumed_run_reproduces_the_losses_and_the_weights_of_the_uninterrupted_one(family, config_for, tmp_path):
    options = {"save_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.01, "max_steps": 8}
    train(config_for("whole", family, **options))
    cut_off(prepare(config_for("parts", family, **options)), step=6)
    assert logged(tmp_path / "parts", "step") == list(range(1, 6))
    result = train(config_for("parts", family, resume_from_checkpoint=True, **options))
    assert [event["step"] for event in exact_log(tmp_path / "whole")] == list(range(1, 9))
    assert result.steps == 8 and result.tokens == 8 * 2 * 2 * 16
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_base_tensors_keep_their_bytes_new_ones_move_and_what_comes_out_is_a_model(
    family, upscaled, config_for, tmp_path
):
    source, trained = upscaled(family), tmp_path / "out"
    run = prepare(config_for("out", family, max_steps=6))
    batch = next(iter(run.trainer.get_train_dataloader()))
    logits = AutoModelForCausalLM.from_pretrained(source).train()(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    result = run.execute()
    assert result.steps == 6 and result.tokens == 6 * 2 * 16
    assert logged(trained)[0] == pytest.approx(expected.item(), rel=1e-6)
    assert moved(source, trained) == {name for name in weights(source) if is_new(name)} != set()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, trained))
    assert after == before
    assert (trained / "upscale.json").read_bytes() == (source / "upscale.json").read_bytes()
    assert AutoTokenizer.from_pretrained(trained)("w5 w6")["input_ids"] == [5, 6]
    assert AutoModelForCausalLM.from_pretrained(trained).config.upscale["new_layers"] == NEW_LAYERS
    assert not [path.name for path in trained.iterdir() if path.suffix in (".bin", ".pt", ".pth") or path.is_dir()]


USAGE = {"usage_steps": 3, "logging_steps": 4, "activation_checkpointing": True}
KINDS = {
    "bf16": {"bf16": True},
    "num_train_epochs": {"max_steps": None, "num_train_epochs": 2, "per_device_train_batch_size": 20},
    "sparse-log": {"logging_steps": 3},
    "4x-to-1x": {"value_schedule": "4x-to-1x", "value_learning_rate": 3e-2},
    "balance-usage": {"balance_loss": 0.1, "gradient_accumulation_steps": 2, **USAGE},
    "memory": {"memory_learning_rate": 2e-2, "value_weight_decay": 0.1, "min_learning_rate_ratio": 0.1},
    "frozen": {"frozen": ["value"], "adam_beta2": 0.95, "trainable": "all", "document_mask": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_exactly(kind, config_for):
    log = exact_log(assert_resumes(config_for, 4, **{"max_steps": 7, **KINDS[kind]}))
    assert any("memory_perplexity" in event for event in log) == (kind == "balance-usage")
    assert ("learning_rate_memory" in log[0]) == (kind == "memory")


def test_a_stream_resumes_exactly_beyond_its_first_pass(config_for):
    assert 5 * 20 > 1220 // 16, "the checkpoint must lie in the second pass"
    assert_resumes(config_for, 5, per_device_train_batch_size=20, max_steps=7, corpus_options={"streaming": True})


def test_checkpoints_are_models_with_a_tokenizer_and_only_the_latest_are_kept(config_for, tmp_path):
    train(config_for(save_steps=4, max_steps=12))
    checkpoints = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-12", "checkpoint-8"]
    folder = tmp_path / "out" / "checkpoint-8"
    assert AutoTokenizer.from_pretrained(folder)("w5")["input_ids"] == [5]
    assert AutoModelForCausalLM.from_pretrained(folder).config.upscale["new_layers"] == NEW_LAYERS


@pytest.mark.parametrize("family", by_default(["qwen2", "gemma2"], FAMILIES))
def test_in_bf16_a_half_precision_base_keeps_its_bytes_and_new_tensors_move(family, config_for, tmp_path):
    model = save_upscaled(family, tmp_path, dtype=torch.bfloat16)
    run = prepare(config_for(model=model, bf16=True, max_steps=6))
    held = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    assert {held[name] for name in held if is_new(name)} == {torch.float32}
    assert {held[name] for name in held if not is_new(name)} == {torch.bfloat16}
    run.execute()
    assert moved(model, tmp_path / "out") == {name for name in weights(model) if is_new(name)}
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_fp32_computes_in_float32_whatever_the_checkpoint_holds(config_for, tmp_path):
    model = save_upscaled("llama", tmp_path, dtype=torch.bfloat16)
    run = prepare(config_for(model=model, max_steps=4))
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    run.execute()
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert all(is_new(name) for name in moved(model, tmp_path / "out"))


@pytest.mark.parametrize("family", by_default(["qwen3", "gemma2"], FAMILIES))
def test_activation_checkpointing_changes_no_loss(family, config_for, tmp_path):
    for checkpointing in (False, True):
        output = tmp_path / str(checkpointing)
        train(config_for(output, family, max_steps=4, activation_checkpointing=checkpointing))
    assert exact_log(tmp_path / "True") == exact_log(tmp_path / "False")
