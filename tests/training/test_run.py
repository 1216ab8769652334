"""A run trains what it should, leaves the rest as it was, and can be resumed exactly."""

import json
import math

import pytest
import torch
from pairs import by_default
from safetensors.torch import load_file
from tiny import FAMILIES
from training.outcomes import assert_resumes, by_step, logged, moved, weights
from training.tiny_run import NEW_LAYERS, PreparedRun, best_at, give_held_out_losses, is_new, refused, save_upscaled
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.training.checkpoints import load_checkpoint
from midus_hf.training.optim import set_trainable
from midus_hf.training.run import run_training


def test_only_new_tensors_move_and_the_model_loads(family, upscaled, config_for, tmp_path):
    source, trained = upscaled(family), tmp_path / "out"
    run = PreparedRun(config_for("out", family, max_steps=6))
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


KINDS = {
    "bf16 and a sparse log": {"bf16": True, "logging_steps": 3},
    "num_train_epochs": {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 20},
    "checkpointing": {"gradient_accumulation_steps": 2, "logging_steps": 4, "activation_checkpointing": True, "max_grad_norm": 0.01},
    "memory": {"value_schedule": "4x-to-1x", "memory_learning_rate": 2e-2, "value_weight_decay": 0.1, "neftune_noise_alpha": 1.0},
    "smoothed": {"label_smoothing_factor": 0.1, "optim": "adafactor"},
    "frozen": {"frozen": ["value"], "adam_beta2": 0.95, "trainable": "all", "document_mask": True, "family": "gemma3"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_exactly(kind, config_for):
    assert_resumes(config_for, 4, **{"max_steps": 7, **KINDS[kind]})


def test_checkpoint_has_trained_tensors_and_two_are_kept(config_for, upscaled, tmp_path):
    run_training(config_for(save_steps=4, max_steps=12))
    folders = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [path.name for path in folders] == ["checkpoint-12", "checkpoint-8"]
    files = "inputs.json manifest.json optimizer.pt rng_state.pth scheduler.pt trained.safetensors trainer_state.json"
    assert sorted(path.name for path in folders[0].iterdir()) == files.split()
    assert set(load_file(folders[0] / "trained.safetensors")) == {
        name for name in weights(upscaled("llama")) if is_new(name)
    }
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with refused("also has model.layers.1.input_layernorm.weight, so its run trained other tensors"):
        load_checkpoint(model.requires_grad_(False), folders[0])
    set_trainable(model)
    load_checkpoint(model, folders[0])
    saved = weights(tmp_path / "out")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    with refused("has no trained.safetensors; expected a checkpoint of a run"):
        load_checkpoint(model, tmp_path)


def test_held_out_text_is_measured_and_the_best_model_is_saved(config_for, corpus, tmp_path, monkeypatch):
    options = {"eval_text": str(corpus), "eval_steps": 2, "save_steps": 2, "max_steps": 6}
    run_training(config_for("last", **options, save_total_limit=None))
    losses = by_step(tmp_path / "last", "eval_loss")
    assert list(losses) == [2, 4, 6] and losses[6] < losses[2]
    assert by_step(tmp_path / "last", "eval_perplexity") == {step: math.exp(loss) for step, loss in losses.items()}
    give_held_out_losses(monkeypatch, best_at(2))
    options["load_best_model_at_end"] = True
    run_training(config_for("best", **options))
    monkeypatch.undo()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    set_trainable(model)
    load_checkpoint(model, tmp_path / "last" / "checkpoint-2")

    def is_best(output):
        saved = weights(tmp_path / output)
        return all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())

    assert is_best("best")
    (tmp_path / "best").rename(tmp_path / "moved")
    run_training(config_for("moved", **options, resume_from_checkpoint=True))
    assert is_best("moved")


def test_a_refusal_of_held_out_text_names_its_key(config_for, tmp_path):
    for name, text in (("short", "w5 w6"), ("blank", " ")):
        (tmp_path / f"{name}.txt").write_text(text)
    with refused(r"eval_text a has 3 tokens; expected at least one sequence of \d+ tokens"):
        run_training(config_for(eval_text={"a": str(tmp_path / "short.txt")}, eval_steps=1))
    with refused(r"eval_text '.*blank.txt' is empty"):
        run_training(config_for(eval_text=str(tmp_path / "blank.txt"), eval_steps=1))


@pytest.mark.parametrize(
    ("family", "bf16"), [*((family, True) for family in by_default(["gemma2"], FAMILIES)), ("llama", False)]
)
def test_new_tensors_of_a_bfloat16_base_train_in_float32(family, bf16, config_for, tmp_path):
    """And so is all of it without bf16."""
    model = save_upscaled(family, tmp_path, dtype=torch.bfloat16)
    run = PreparedRun(config_for(model=model, bf16=bf16, max_steps=6))
    for name, parameter in run.model.named_parameters():
        assert parameter.dtype is (torch.float32 if is_new(name) or not bf16 else torch.bfloat16), name
    run.execute()
    assert moved(model, tmp_path / "out") == {name for name in weights(model) if is_new(name)}
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_document_mask_gives_positions_and_no_cache(config_for):
    run = PreparedRun(config_for(document_mask=True, sequence_length=122))
    batch = next(iter(run.trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert run.model.config.use_cache is False
    restarts = batch["position_ids"][:, 1:] == 0
    assert restarts.any()
    assert torch.equal(batch["labels"][:, 1:] == -100, restarts)
