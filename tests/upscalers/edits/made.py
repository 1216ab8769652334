"""Tiny checkpoints with chapters, written tensor by tensor, and what their banks hold."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.config.model_sizes import ModelSizes
from tests.upscalers.checkpoints import config_of, content_digest, read_tensors, save_base
from upscalers.runs.output_folder import write_code_of

# C, S, T, the layers with a memory, and D of the checkpoints.
CHAPTERS, SHARED, TOKENS, LAYERS, HIDDEN = 6, 1, 4, (0, 1, 2, 3), 32


def options(**changes: Any) -> dict[str, Any]:
    """Options of a memory with so many chapters, and what differs from the usual."""
    chapters = changes.get("chapters", CHAPTERS)
    return {
        "memory_tokens": chapters * TOKENS,
        "chapters": chapters,
        "shared_chapters": SHARED,
        "k": 2,
        "share": "all",
        **changes,
    }


def save_chapters(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sharded: bool = False,
    prefix: str = "model.",
    names: tuple[str, ...] = ("chapters",),
    **changes: Any,
) -> Path:
    """Save a tiny Llama to whose layers memories of chapters are attached, with what an upscaling writes beside it.

    Its base lies in the folder of that name with `-base` behind it.

    Args:
        folder: Where to.
        dtype: Of every tensor.
        seed: Of the memory's values.
        sharded: Whether there are two files and an index.
        prefix: In front of the names of the decoder's tensors, `"model."` or nothing.
        names: Of its memories, the last one new and those before it of the base.
        changes: Options that differ from the usual.
    """
    base = save_base(folder.with_name(f"{folder.name}-base"), dtype=dtype, prefix=prefix)
    base_config, tensors = config_of(base), read_tensors(base)
    sizes = ModelSizes(hidden_size=HIDDEN, num_heads=4, num_layers=len(LAYERS))
    entries = [MemoryEntry(ChaptersOptions(**options(**changes)), "behind-attention", LAYERS, name) for name in names]
    generator = torch.Generator().manual_seed(seed)
    for entry in entries:
        memories = Memories((entry,), sizes)
        declared = {
            f"layers.{layer}.{name}": t for layer in LAYERS for name, t in memories.layer_tensors(layer).items()
        }
        for name, tensor in {**declared, **memories.table_tensors()}.items():
            if tensor.dtype:
                integers = torch.randint(0, 127, tensor.shape, generator=generator)
                tensors[prefix + name] = integers.to(getattr(torch, tensor.dtype))
            else:
                tensors[prefix + name] = torch.randn(tensor.shape, generator=generator).to(dtype)
    report = [entry.to_dict() for entry in entries]
    if names[1:]:
        base_config = {**base_config, "memory": report[:-1]}
    record = {
        "method": "moc",
        "new_layers": [],
        "new_memories": [names[-1]],
        "plan": [{"base": layer} for layer in LAYERS],
        "options": {},
        "base_config": base_config,
        "base_sha256": content_digest(read_tensors(base)),
    }
    config = {**base_config, "model_type": "midus_llama", "memory": report, "upscale": record}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files = {"model.safetensors": list(read_tensors(base))}
    (folder / "upscale.json").write_text(
        json.dumps({"midus_hf": "0", **record, "base": {"name": "base", "files": files}})
    )
    (folder / "README.md").write_text("# A model\n\nWith chapters.\n")
    (folder / "tokenizer.json").write_text("a tokenizer")
    (folder / "generation_config.json").write_text("{}")
    write_code_of(folder)
    _save(folder, tensors, sharded)
    return folder


def bank_name(number: int = 0, memory: str = "chapters") -> str:
    """The name of a bank that layers share."""
    return f"model.memory_tables.{memory}.{number}.bank"


def router_names(layer: int, memory: str = "chapters") -> tuple[str, str]:
    """The names of a layer's router, weight and bias."""
    return tuple(f"model.layers.{layer}.memories.{memory}.router_{kind}" for kind in ("weight", "bias"))  # type: ignore[return-value]


def rows(number: int) -> slice:
    """The rows of a chapter."""
    return slice(number * TOKENS, (number + 1) * TOKENS)


def _save(folder: Path, tensors: dict[str, torch.Tensor], sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_file in parts.items():
        save_file({name: tensors[name] for name in of_file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, of_file in parts.items() for name in of_file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
