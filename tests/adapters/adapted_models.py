"""Models with adapters of PEFT, and what they have in common with models that were saved, loaded and merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LINEAR = {*ATTENTION, "gate_proj", "up_proj", "down_proj"}


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
    """Return what a model computes of a prompt, in eval mode."""
    return model.eval()(prompt() if tokens is None else tokens, use_cache=False, **inputs).logits


def adapted_model(model: Any, target_modules: str | list[str] = "all-linear", **options: Any) -> PeftModel:
    """Put adapters of LoRA on a model, which change nothing yet."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=target_modules, task_type="CAUSAL_LM", **{"r": 4, **options})
    return get_peft_model(model, config).eval()


@torch.no_grad()
def let_act(adapted: PeftModel) -> None:
    """Move adapters off zero."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.05)


def adapted_projections(model: PeftModel, layer: int) -> set[str]:
    """Return the names of the projections of one layer that hold an adapter."""
    prefix = f"base_model.model.model.layers.{layer}."
    names = (name for name, _ in model.named_modules() if name.startswith(prefix) and name.endswith(".lora_A.default"))
    return {name.removeprefix(prefix).removesuffix(".lora_A.default").rpartition(".")[2] for name in names}


def assert_saved_and_merged(model: PeftModel, fresh: Callable[[], Any], folder: Path) -> Any:
    """Compare an adapted model with one that its adapter is loaded into, and with what it is merged into.

    Args:
        model: After training.
        fresh: Gives the model that adapters were put on.
        folder: Where the adapter is saved.

    Returns:
        The merged model.
    """
    trained = logits(model)
    model.save_pretrained(folder)
    assert torch.equal(logits(PeftModel.from_pretrained(fresh(), folder)), trained)
    tokens = model.generate(input_ids=prompt(), max_new_tokens=6, do_sample=False)
    merged = model.merge_and_unload()
    # Merging adds the product of A and B to a weight, which rounds once more.
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-5)
    assert torch.equal(merged.generate(prompt(), max_new_tokens=6, do_sample=False), tokens)
    assert not any("lora" in name for name in merged.state_dict())
    return merged


def assert_checkpointing_changes_no_gradient(adapted: Callable[[], PeftModel]) -> None:
    """Compare gradients with and without activation checkpointing, bit by bit."""
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = adapted().train()
        if is_checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
