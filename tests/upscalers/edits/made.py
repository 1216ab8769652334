"""Tiny checkpoints with memories that act, and what banks of chapters hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.upscalers.checkpoints import save_base, tensor_files
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.quantising import quantise
from upscalers.runs.upscale import upscale

# C, T and the layers with a memory of the checkpoints.
CHAPTERS, TOKENS, LAYERS = 6, 4, (0, 1, 2, 3)


def options(**changes: Any) -> dict[str, Any]:
    """Return options of a memory in all layers, with what differs from the usual."""
    return {"memory_tokens": CHAPTERS * TOKENS, "chapters": CHAPTERS, "k": 2, "layers": list(LAYERS), **changes}


def save_chapters(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    prefix: str = "model.",
    names: tuple[str, ...] = ("chapters",),
    bank_bits: Literal[8, 4] | None = None,
    **changes: Any,
) -> Path:
    """Attach memories of chapters with random values to all layers of a tiny Llama, and return the folder.

    The Llama lies in the folder of that name with `-base` behind it. `prefix` is that of the decoder's tensors. Of the memories
    named, the last one is new and those before it are of the base. `changes` are options that differ from the usual.
    """
    base = save_base(folder.with_name(f"{folder.name}-base"), dtype=dtype, prefix=prefix)
    (base / "tokenizer.json").write_text("a tokenizer")
    request = {"options": options(**changes), "max_shard_size": "40KB" if sharded else "5GB", "verify": False}
    for name in names:
        output = folder if name == names[-1] and bank_bits is None else folder.with_name(f"{folder.name}-{name}")
        upscale(base=base, method="moc", output=output, **request)
        base = output
    give_values(base)
    for name in names if bank_bits is not None else ():
        output = folder if name == names[-1] else folder.with_name(f"{folder.name}-rounded-{name}")
        quantise(EditRequest(base, output, name), bank_bits)
        base = output
    return folder


def give_values(folder: Path, never_chosen: Sequence[int] = ()) -> None:
    """Give random values to all that memories have; no router chooses some chapters, if any."""
    generator = torch.Generator().manual_seed(0)
    for file in tensor_files(folder):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "memor" in name:
                tensors[name] = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if name.endswith("router_bias"):
                tensors[name][list(never_chosen)] = -1e6
        save_file(tensors, file, {"format": "pt"})


def bank_name(number: int = 0, memory: str = "chapters") -> str:
    """The name of a bank that layers share."""
    return f"model.memory_tables.{memory}.{number}.bank"


def rows(number: int) -> slice:
    """The rows of a chapter."""
    return slice(number * TOKENS, (number + 1) * TOKENS)
