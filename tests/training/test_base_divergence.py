"""With base_kl a run also learns to stay near its base, which is the model with what it added switched off."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from look.upscaled_folders import METHODS, acting, loaded, saved_pair
from tiny import FAMILIES, save_tiny_model
from training.outcomes import assert_close_weights, assert_resumes, assert_same_blocks, bank_of, logged, moved
from training.tiny_run import PreparedRun, refused
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from midus_hf.training import base_divergence
from midus_hf.training.base_divergence import base_logits, check_base_divergence, divergence_without_target
from midus_hf.training.optim import set_trainable
from midus_hf.training.run import measure_texts, run_training
from upscalers.runs.upscale import upscale


def test_divergence_leaves_out_the_next_token(monkeypatch):
    torch.manual_seed(0)
    logits, base = (3 * torch.randn(2, 7, 11, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(11, (2, 7))
    labels[0, 3] = labels[1, 0] = -100
    expected = 0.0
    for row in range(2):
        for position in range(6):
            target = labels[row, position + 1].item()
            if target == -100:
                continue
            rest = [token for token in range(11) if token != target]
            q, p = (each[row, position, rest].softmax(0) for each in (base, logits))
            expected += (q * (q.log() - p.log())).sum().item()
    for size in (256, 2):
        monkeypatch.setattr(base_divergence, "_TOKENS_AT_A_TIME", size)
        assert divergence_without_target(logits, base, labels).item() == pytest.approx(expected, rel=1e-12)
        assert torch.autograd.gradcheck(
            lambda logits: divergence_without_target(logits, base, labels), logits.clone().requires_grad_()
        )
    assert divergence_without_target(logits, base, torch.full_like(labels, -100)).item() == 0.0
    half = divergence_without_target(logits.bfloat16(), base.bfloat16(), labels)
    assert half.dtype is torch.float32 and half.item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_base_logits_are_exact_after_training(method, family):
    base, model = map(loaded, saved_pair(family, method))
    acting(model).train()
    ids = torch.randint(3, 100, (2, 12))
    with torch.no_grad():
        expected = base(ids).logits
        assert torch.equal(base_logits(model, {"input_ids": ids, "labels": ids}), expected)
        assert model.training and not torch.equal(model(ids).logits, expected)


ADAPTERS = {"adapters": {"r": 4, "lora_dropout": 0.5}}


@pytest.mark.parametrize("options", [{}, ADAPTERS, {"attn_implementation": "eager", "bf16": True}, None], ids=str)
def test_passes_of_the_base_leave_nothing_behind(options, config_for, blocks_for, upscaled, tmp_path):
    """A run that computes the divergence, and gives it no weight, is the run without it; the base fetches no blocks."""
    model = upscaled("llama", "ultramem-v2")
    make = blocks_for if options is None else partial(config_for, model=model, max_steps=4, **options)
    PreparedRun(make("without")).execute()
    run = PreparedRun(make("with", base_kl=1.0))
    run.trainer.base_kl = 1e-300
    run.execute()
    assert moved(tmp_path / "with", tmp_path / "without") == set()
    if options is None:
        assert_same_blocks(bank_of(tmp_path / "without"), bank_of(tmp_path / "with"))
    assert logged(tmp_path / "with") == logged(tmp_path / "without")
    diverged = logged(tmp_path / "with", "base_divergence")
    assert diverged[0] < 1e-6 and diverged[-1] > 1e-9


def test_the_logged_loss_has_the_weighted_divergence(config_for, tmp_path):
    run = PreparedRun(config_for("heavy", base_kl=2.0, max_steps=1))
    ids = next(iter(run.trainer.get_train_dataloader()))["input_ids"]
    acting(run.model)
    with torch.no_grad():
        outputs = run.model(input_ids=ids, labels=ids)
        base = base_logits(run.model, {"input_ids": ids})
        divergence = divergence_without_target(outputs.logits, base, ids) / (ids.numel() - len(ids))
    run.execute()
    assert logged(tmp_path / "heavy", "base_divergence") == [pytest.approx(divergence.item(), rel=1e-4)]
    assert logged(tmp_path / "heavy")[0] == pytest.approx((outputs.loss + 2 * divergence).item(), rel=1e-4)


def test_accumulation_weighs_divergence_as_one_batch(config_for, tmp_path):
    options = {"base_kl": 3.0, "max_steps": 4, "optim": "sgd", "learning_rate": 0.1}
    run_training(config_for("one", per_device_train_batch_size=4, **options))
    run_training(config_for("two", gradient_accumulation_steps=2, **options))
    assert_close_weights(tmp_path / "one", tmp_path / "two")
    for name in ("loss", "base_divergence"):
        assert logged(tmp_path / "two", name) == pytest.approx(logged(tmp_path / "one", name), rel=1e-3)


def test_base_kl_run_resumes_and_evaluates_without_it(config_for, corpus, tmp_path):
    held_out = {"eval_text": str(corpus), "eval_steps": 7}
    assert_resumes(config_for, 4, max_steps=7, base_kl=50.0, **held_out)
    (held,) = logged(tmp_path / "whole", "eval_loss")
    (measured,) = measure_texts(config_for("measured", model=tmp_path / "whole", **held_out)).values()
    assert held == pytest.approx(measured, rel=1e-6)
    assert logged(tmp_path / "whole", "base_divergence")[-1] > 1e-4


def trainer_of(model, **changes) -> SimpleNamespace:
    of_processes = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "accelerator": SimpleNamespace()}
    return SimpleNamespace(model=model, args=SimpleNamespace(base_kl=0.3), **{**of_processes, **changes})


def test_models_without_a_base_are_refused(upscaled, tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    upscale(base=base, method="stack", output=tmp_path / "stack", options={"layers": "0-2,1-3"}, verify=False)
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    set_trainable(model)
    check_base_divergence(trainer_of(model))
    stack = AutoModelForCausalLM.from_pretrained(tmp_path / "stack").requires_grad_(False)
    shared = "processes that hold whole models. Start"
    for trainer, expected in (
        (
            trainer_of(AutoModelForSequenceClassification.from_pretrained(base)),
            "the model has no language model's head",
        ),
        (trainer_of(model, is_deepspeed_enabled=True, deepspeed=None), shared),
        (trainer_of(model, is_fsdp_enabled=True), shared),
        (trainer_of(model, accelerator=SimpleNamespace(parallelism_config=object())), shared),
        (trainer_of(stack), "the model lacks layers of its base"),
    ):
        with refused(f"base_kl is 0.3, and .*{expected}"):
            check_base_divergence(trainer)
