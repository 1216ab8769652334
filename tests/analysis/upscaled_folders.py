"""Tiny checkpoints of the methods that add something, whose new parts act."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models.hierarchical_models import fill
from retrieval.tiny_bert import WIDTH, save_tiny_bert
from retrieval.trees import random_tree
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from midus_hf.analysis.inside.added_parts import added_parts
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.retrieval.tree_files import TreeOrigin
from upscalers.runs.upscale import upscale

# Methods that start at the base, and small options of each.
METHODS: dict[str, dict[str, Any]] = {
    "midus-hml": {"n": 4, "k": 2},
    "midus-pkm": {"n": 4, "k": 2},
    "moc": {"memory_tokens": 24, "chapters": 6, "k": 2, "layers": [0, 2], "share": "all"},
    "ultramem-v2": {"n": 4, "k": 2},
    "moda": {},
    "llama-pro": {},
}


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


def saved_with_bank(base: Path, folder: Path) -> SimpleNamespace:
    """Save a `model` with a bank of 3 by 9 whose blocks act, made of a base, and a `tree` for it whose paths a tiny `bert` finds."""
    saved = SimpleNamespace(model=folder / "model", tree=folder / "tree", bert=save_tiny_bert(folder / "bert"))
    options = {"sizes": [3, 2], "branching": 3}
    upscale(base=base, method="hier-ffn", output=saved.model, options=options, verify=False)
    bank = MemoryBank(
        saved.model / "memory_bank" / "hier-ffn", loaded(saved.model).banks.of("hier-ffn").layout, writable=True
    )
    fill(bank)
    bank.close()
    random_tree(3, 2, width=WIDTH, origin=TreeOrigin(embedding_model=str(saved.bert))).save(saved.tree)
    return saved


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
