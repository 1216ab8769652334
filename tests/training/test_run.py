"""A run trains what it should, leaves the rest as it was, and can be resumed exactly."""

import json

import pytest
import torch
from pairs import by_default
from tiny import FAMILIES
from training.outcomes import assert_resumes, assert_same_run, events, exact_log, logged, moved, weights
from training.steered_runs import cut_off, executed_with_rates
from training.tiny_run import NEW_LAYERS, save_upscaled
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.training.run.train import prepare, train


def is_new(name: str) -> bool:
    return any(name.startswith(f"model.layers.{layer}.") for layer in NEW_LAYERS)


def test_base_tensors_keep_their_bytes_and_every_new_tensor_moves(family, upscaled, config_for, tmp_path):
    result = train(config_for("out", family, max_steps=6))
    assert result.steps == 6 and result.tokens == 6 * 2 * 16
    new = {name for name in weights(upscaled(family)) if is_new(name)}
    assert moved(upscaled(family), tmp_path / "out") == new != set()


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


USAGE = {"usage_steps": 3, "logging_steps": 4, "activation_checkpointing": True}
KINDS = {
    "streaming": {"corpus_options": {"streaming": True}},
    "bf16": {"bf16": True},
    "num_train_epochs": {"max_steps": None, "num_train_epochs": 2, "per_device_train_batch_size": 20},
    "sparse-log": {"logging_steps": 3},
    "all": {"trainable": "all", "document_mask": True},
    "4x-to-1x": {"value_schedule": "4x-to-1x"},
    "fixed-balance": {"value_schedule": "fixed", "value_learning_rate": 3e-2, "balance_loss": 0.1, "gradient_accumulation_steps": 2},
    "balance-usage": {"balance_loss": 0.1, **USAGE},
    "warmup-stable-decay": {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.3, "min_learning_rate_ratio": 0.1},
    "memory": {"memory_learning_rate": 2e-2, "value_weight_decay": 0.1, "min_learning_rate_ratio": 0.1},
    "frozen": {"frozen": ["value"], "adam_beta2": 0.95, "trainable": "all"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_exactly(kind, config_for):
    log = exact_log(assert_resumes(config_for, 4, **{"max_steps": 7, **KINDS[kind]}))
    assert any("memory_perplexity" in event for event in log) == (kind == "balance-usage")
    assert ("learning_rate_memory" in log[0]) == (kind == "memory")


def test_a_stream_resumes_exactly_beyond_its_first_pass(config_for):
    assert 5 * 20 > 1220 // 16, "the checkpoint must lie in the second pass"
    assert_resumes(config_for, 5, per_device_train_batch_size=20, max_steps=7, corpus_options={"streaming": True})


def test_keys_and_values_keep_their_rate_while_the_rest_warms_up_and_falls_to_zero(config_for, tmp_path):
    run = prepare(config_for(key_value_learning_rate=3e-3, value_learning_rate=3e-2))
    rates = executed_with_rates(run)
    assert rates["keys"] == [3e-3] * 20 and rates["values"] == [3e-2] * 20
    assert rates["decay"] == rates["no_decay"]
    assert rates["decay"][:3] == [0, 5e-3, 1e-2] and max(rates["decay"]) == 1e-2
    assert all(later < earlier for earlier, later in zip(rates["decay"][2:], rates["decay"][3:], strict=False))
    assert run.trainer.lr_scheduler.get_last_lr() == [0, 0, 3e-3, 3e-2]
    assert [event["learning_rate"] for event in events(tmp_path / "out")] == rates["decay"]
    assert set(logged(tmp_path / "out", "learning_rate_keys")) == {3e-3}
    assert set(logged(tmp_path / "out", "learning_rate_values")) == {3e-2}


def test_the_first_loss_is_that_of_the_model_on_the_first_batch(family, config_for, upscaled):
    run = prepare(config_for(family=family, max_steps=1))
    batch = next(iter(run.trainer.get_train_dataloader()))
    logits = AutoModelForCausalLM.from_pretrained(upscaled(family)).train()(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    assert run.execute().loss == pytest.approx(expected.item(), rel=1e-6)


def test_training_everything_learns_the_text(config_for, tmp_path):
    config = config_for(trainable="all", max_steps=40, per_device_train_batch_size=8)
    train(config)
    losses = logged(tmp_path / "out")
    assert losses[-1] < losses[0] - 0.5


def test_the_trained_folder_is_a_model_like_the_one_it_came_from(family, config_for, upscaled, tmp_path):
    train(config_for(family=family, max_steps=2))
    source, trained = upscaled(family), tmp_path / "out"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, trained))
    assert after == before
    assert (trained / "upscale.json").read_bytes() == (source / "upscale.json").read_bytes()
    assert AutoTokenizer.from_pretrained(trained)("w5 w6")["input_ids"] == [5, 6]
    assert AutoModelForCausalLM.from_pretrained(trained).config.upscale["new_layers"] == NEW_LAYERS
    assert not [path.name for path in trained.iterdir() if path.suffix in (".bin", ".pt", ".pth") or path.is_dir()]


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


def test_tensorboard_gets_the_log_if_asked(config_for, tmp_path):
    pytest.importorskip("tensorboard")
    train(config_for(max_steps=2, report_to="tensorboard"))
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


def test_a_loss_that_is_not_finite_stops_the_run(config_for, tmp_path):
    run = prepare(config_for(save_steps=1))
    with torch.no_grad():
        run.model.model.layers[1].input_layernorm.weight.fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"loss is nan at step 1; expected a finite number. Lower the learning"
    ):
        run.execute()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert not (tmp_path / "out" / "config.json").exists()
