"""Tiny checkpoints to upscale, and what they hold and compute."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import prompt, tiny_model
from transformers import AutoModelForCausalLM

import midus_hf  # noqa: F401 - registers the classes
from upscalers.record.provenance import UpscaleReport
from upscalers.request import Progress
from upscalers.runs.upscale import upscale

SMALL_MEMORY = {"n": 8, "k": 2}
# What `SMALL_MEMORY` means to midus-hml, in full.
MEMORY_OPTIONS = {
    "k": 2,
    "query_norm": "none",
    "inner_residual": False,
    "addressing": "content",
    "n": 8,
    "output_projection": False,
}
# Small sizes for each method that inserts memory.
SMALL = {"midus-hml": SMALL_MEMORY, "midus-pkm": SMALL_MEMORY, "midus-linear": {"slots": 12, "k": 2}}

# Head-wise memories of such sizes, as words of the command `upscale`.
REQUEST = ("--method", "midus-hml", "--output", "out", "--set", "n=8", "--set", "k=2", "--no-verify")

# What `strip` adds to the base that it gives back.
RECORD = ("upscale.json",)


def save_base(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: str | None = None,
    prefix: str = "model.",
    **changes: Any,
) -> Path:
    """Save a tiny base, with these fields of its config; `prefix` is in front of the names of the decoder's tensors."""
    model = tiny_model(family, dtype, **changes)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    if prefix != "model.":
        tensors = read_tensors(folder)
        write_tensors(folder, {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return folder


def with_memory(base: Path, output: Path, **request: Any) -> UpscaleReport:
    """Insert small head-wise memories, unless the request says otherwise."""
    return upscale(base=base, output=output, **{"method": "midus-hml", "options": SMALL_MEMORY, **request})


def unverified(base: Path, output: Path, **request: Any) -> Path:
    """Return the folder of a model with such memories, whose logits were not compared with the base's."""
    with_memory(base, output, **{"verify": False, **request})
    return output


def config_of(folder: Path) -> dict[str, Any]:
    """Read its `config.json`."""
    return json.loads((folder / "config.json").read_text())


def record_of(folder: Path) -> dict[str, Any]:
    """Read its `upscale.json`."""
    return json.loads((folder / "upscale.json").read_text())


def recipe_of(folder: Path) -> str:
    """Return the YAML in its model card, which makes the same again."""
    return (folder / "README.md").read_text().split("```yaml\n")[1].split("```")[0]


def tensor_files(folder: Path) -> list[Path]:
    """Its safetensors files."""
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


class Recorder(Progress):
    """Remembers whether it was shown, warnings, and stages: name, steps announced, and steps told one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.stages: list[tuple[str, int, list[int]]] = []
        self.warnings: list[str] = []
        self.warn = self.warnings.append
        self.start, self.finish = (partial(self.shown.append, name) for name in ("start", "finish"))

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        self.stages.append((name, num_steps, []))

    def advance(self, num_steps: int = 1) -> None:
        self.stages[-1][2].append(num_steps)

    @property
    def names(self) -> list[str]:
        """Names of the stages."""
        return [name for name, _, _ in self.stages]

    def told_of(self, name: str) -> list[int]:
        """Return the steps that were told of a stage."""
        return next(steps for stage, _, steps in self.stages if stage == name)

    @property
    def balanced(self) -> bool:
        """Whether every stage took the steps it announced."""
        return all(sum(report) == announced > 0 for _, announced, report in self.stages)
