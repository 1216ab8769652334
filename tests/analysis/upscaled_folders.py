"""Tiny checkpoints of the methods that add something, whose new parts act."""

from pathlib import Path
from typing import Any

import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from midus_hf.analysis.inside.added_parts import added_parts
from upscalers.runs.upscale import upscale

METHODS: dict[str, dict[str, Any]] = {
    "midus-hml": {"n": 4, "k": 2},
    "midus-pkm": {"n": 4, "k": 2},
    "moc": {"memory_tokens": 24, "chapters": 6, "k": 2, "layers": [0, 2], "share": "all"},
    "ultramem-v2": {"n": 4, "k": 2},
    "moda": {},
    "llama-pro": {},
}
"""Methods that start at the base, and small options of each."""


def saved_pair(family: str, method: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """A tiny base in `folder / "base"`, and what a method makes of it in `folder / "model"`, which computes the same.

    Args:
        family: Of the table.
        method: Of `METHODS`.
        folder: Where to.
        options: Of the method that differ.
    """
    base = save_tiny_model(family, folder / "base")
    given = {**METHODS[method], **options}
    upscale(base=base, method=method, output=folder / "model", options=given, verify=False)
    return base, folder / "model"


def loaded(folder: Path) -> PreTrainedModel:
    """The model of a folder, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def acting(model: PreTrainedModel) -> PreTrainedModel:
    """The model with new parts that are moved off their start, so that they act; what is of the base stays."""
    torch.manual_seed(5)
    inserted = [f"layers.{part.layers[0]}." for part in added_parts(model).parts if part.kind in ("block", "layer")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memor" in name or any(layer in name for layer in inserted):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
