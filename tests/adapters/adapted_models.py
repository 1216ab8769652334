"""Models with adapters of PEFT, and what they have in common with models that were saved, loaded and merged."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model


def adapted_model(model: Any, target_modules: str | list[str] = "all-linear", **options: Any) -> PeftModel:
    """Put adapters of LoRA on a model, which change nothing yet."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=target_modules, task_type="CAUSAL_LM", **{"r": 4, **options})
    return get_peft_model(model, config).eval()


@torch.no_grad()
def save_adapter(model: Any, config: LoraConfig, folder: Path) -> PeftModel:
    """Save an adapter in which every trained tensor is random."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def let_act(adapted: PeftModel) -> None:
    """Move adapters off zero."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.05)
