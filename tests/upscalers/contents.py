"""What checkpoints hold and compute."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import prompt
from transformers import AutoModelForCausalLM

import midus_hf  # noqa: F401 - registers the classes


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "upscale.json").read_text())


def recipe_of(folder: Path) -> str:
    """Return the YAML in its model card, which makes the same again."""
    return (folder / "README.md").read_text().split("```yaml\n")[1].split("```")[0]


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by full name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in tensor_files(folder):
        result = load_file(path)
        assert not result.keys() & tensors.keys()
        tensors.update(result)
    return tensors


def layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer by their name within it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def content_digest(tensors: dict[str, torch.Tensor]) -> str:
    """What `upscale` records of these weights as a base."""
    lines = []
    for name in sorted(tensors, key=lambda name: name.removeprefix("model.")):
        tensor = tensors[name]
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[tensor.dtype]
        content = f"{dtype}:{list(tensor.shape)}\n".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name.removeprefix('model.')}:{hashlib.sha256(content).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_digests(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def load(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    """The model in a folder, in eval mode, by transformers' own way."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def long_prompt() -> torch.Tensor:
    """Return token ids `[2, 20]` that every tiny model knows, longer than the sliding windows."""
    return torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, dtype: torch.dtype | str = "auto", **inputs: torch.Tensor) -> torch.Tensor:
    """Logits of the prompt, or of other `inputs` of the forward pass."""
    with torch.no_grad():
        return load(folder, dtype)(**{"input_ids": prompt(), **inputs}).logits


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    bits = [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def same_tensors(left: Path, right: Path) -> bool:
    """Whether two checkpoints hold the same tensors, byte for byte."""
    first, second = read_tensors(left), read_tensors(right)
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)
