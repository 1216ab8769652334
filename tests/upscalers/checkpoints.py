"""Tiny checkpoints to upscale, and what they hold and compute."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import FAMILIES, NUM_LAYERS, prompt, tiny_model
from transformers import AutoModelForCausalLM

import midus_hf  # noqa: F401 - registers the classes

SMALL_MEMORY = {"n": 8, "k": 2}
MEMORY_OPTIONS = {
    "k": 2,
    "query_norm": "none",
    "temperature": 1.0,
    "gate": "none",
    "inner_residual": False,
    "addressing": "content",
    "n": 8,
    "values": "expanded",
    "output_projection": False,
}
"""What `SMALL_MEMORY` means to midus-hml, in full."""
SMALL = {"midus-hml": SMALL_MEMORY, "midus-pkm": SMALL_MEMORY, "midus-linear": {"slots": 12, "k": 2}}
"""Small sizes for each method that inserts memory."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hml, shared values": ("midus-hml", {"values": "shared"}),
    "hml, own values": ("midus-hml", {"values": "own"}),
    "hml, output projection": ("midus-hml", {"output_projection": True}),
    "hml, output projection and residual": ("midus-hml", {"output_projection": True, "inner_residual": True}),
    "hml, residual": ("midus-hml", {"inner_residual": True}),
    "hml, batch norm": ("midus-hml", {"query_norm": "batch"}),
    "hml, layer norm and temperature": ("midus-hml", {"query_norm": "layer", "temperature": 0.25}),
    "hml, gate a token": ("midus-hml", {"gate": "token"}),
    "hml, gate a head": ("midus-hml", {"gate": "head", "output_projection": True}),
    "pkm": ("midus-pkm", {}),
    "pkm, bare": ("midus-pkm", {"query_norm": "none", "inner_residual": False}),
    "pkm, layer norm and gate": ("midus-pkm", {"query_norm": "layer", "gate": "token", "temperature": 2.0}),
    "linear": ("midus-linear", {}),
    "linear, bare": ("midus-linear", {"query_norm": "none", "inner_residual": False}),
    "linear, layer norm and gate": ("midus-linear", {"query_norm": "layer", "gate": "token"}),
}
"""Every option that changes a memory block, beside midus-hml as it is: method and options without sizes."""


def variants(family: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """`VARIANTS` with small sizes, without what the family has no widths for."""
    config = FAMILIES[family].config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow = head_dim * config.num_attention_heads == config.hidden_size
    return {
        name: (method, {**SMALL[method], **options})
        for name, (method, options) in VARIANTS.items()
        if narrow or name != "hml, residual"
    }


def base_for(variant: str) -> dict[str, Any]:
    """What a base's config must say for a key of `VARIANTS`, so that every family can have it.

    Only a block whose heads are together as wide as the hidden state has something to add to.
    """
    return {"head_dim": 8} if variant == "hml, residual" else {}


RECORD = ("upscale.json",)
"""What `strip` puts beside the base that it gives back."""

NUM_NEW_LAYERS = NUM_LAYERS // 2


def save_base(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: str | None = None,
    prefix: str = "model.",
    **changes: Any,
) -> Path:
    """Save a tiny base as any checkpoint is saved.

    Args:
        folder: Where to.
        family: A key of `tiny.NATIVE_FAMILIES`.
        dtype: Of every tensor.
        max_shard_size: One file where it is None.
        prefix: In front of the names of the decoder's tensors, `"model."` or nothing.
        changes: Fields of the config that differ from the table's.
    """
    model = tiny_model(family, dtype, **changes)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    if prefix != "model.":
        tensors = read_tensors(folder)
        write_tensors(folder, {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return folder


def tensor_files(folder: Path) -> list[Path]:
    """Its safetensors files."""
    return sorted(folder.glob("*.safetensors"))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by full name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in tensor_files(folder):
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
        assert not found.keys() & tensors.keys()
        tensors.update(found)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Make these the tensors of a checkpoint, in one file."""
    for path in [*tensor_files(folder), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def content_digest(tensors: dict[str, torch.Tensor]) -> str:
    """What `upscale` records of these weights as a base."""
    lines = []
    for name in sorted(tensors, key=lambda name: name.removeprefix("model.")):
        tensor = tensors[name]
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[tensor.dtype]
        content = f"{dtype}:{list(tensor.shape)}\n".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name.removeprefix('model.')}:{hashlib.sha256(content).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def edit_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Set keys of `config.json`; those set to `...` are removed."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(config))
    return config


def file_digests(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """A digest of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def load(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    """The model in a folder, in eval mode, by transformers' own way."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def logits(folder: Path, dtype: torch.dtype | str = "auto") -> torch.Tensor:
    """Logits of the prompt."""
    with torch.no_grad():
        return load(folder, dtype)(prompt()).logits


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def same_tensors(left: Path, right: Path) -> bool:
    """Whether two checkpoints hold the same tensors, byte for byte."""
    first, second = read_tensors(left), read_tensors(right)
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)
