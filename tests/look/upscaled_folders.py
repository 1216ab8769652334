"""Tiny checkpoints of the methods that add something, whose new parts act."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models.memory_models import fill
from tiny import save_tiny_model
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree
from transformers import AutoModelForCausalLM, PreTrainedModel

from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.models.view import ModelView
from midus_hf.topics.tree import TreeOrigin
from upscalers.runs.upscale import upscale

# Methods that start at the base, and small options of each.
METHODS: dict[str, dict[str, Any]] = {"moda": {}, "llama-pro": {}}
METHODS |= {name: {"n": 4, "k": 2} for name in ("midus-hml", "midus-pkm", "ultramem-v2")}
METHODS["moc"] = {"memory_tokens": 24, "chapters": 6, "k": 2, "layers": [0, 2], "share": "all"}


_folders = tempfile.TemporaryDirectory(prefix="upscaled-")


@functools.cache
def saved_pair(family: str, method: str, **options: Any) -> tuple[Path, Path]:
    """Return the folders of a tiny base and of what a method of `METHODS` makes of it, which computes the same.

    `options` of the method differ from those of `METHODS`. The folders are shared by tests, which leave them as they are.
    """
    folder = Path(tempfile.mkdtemp(dir=_folders.name))
    base = save_tiny_model(family, folder / "base")
    upscale(base=base, method=method, output=folder / "model", options={**METHODS[method], **options}, verify=False)
    return base, folder / "model"


def saved_with_bank(base: Path, folder: Path) -> SimpleNamespace:
    """Save a `model` with a bank of 3 by 9 whose blocks act, made of a base, and a `tree` for it whose paths a tiny `bert` finds."""
    saved = SimpleNamespace(model=folder / "model", tree=folder / "tree", bert=save_tiny_bert(folder / "bert"))
    options = {"sizes": [3, 2], "branching": 3}
    upscale(base=base, method="hier-ffn", output=saved.model, options=options, verify=False)
    bank = MemoryBank(saved.model / "memory_bank" / "hier-ffn", loaded(saved.model).banks.bank("hier-ffn").layout)
    fill(bank)
    random_tree(3, 2, width=WIDTH, origin=TreeOrigin(embedding_model=str(saved.bert))).save(saved.tree)
    return saved


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def acting(model: PreTrainedModel) -> PreTrainedModel:
    """The model with new parts that are moved off their start, so that they act; what is of the base stays."""
    torch.manual_seed(5)
    inserted = [f"layers.{part.layers[0]}." for part in ModelView(model).parts if part.kind in ("block", "layer")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memor" in name or any(layer in name for layer in inserted):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
