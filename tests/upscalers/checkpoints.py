"""Tiny checkpoints to upscale, requests, and who is told of their progress."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_model

import midus_hf  # noqa: F401 - registers the classes
from tests.upscalers.contents import read_tensors, tensor_files
from upscalers.record.provenance import UpscaleReport
from upscalers.request import Progress
from upscalers.runs.upscale import upscale

SMALL_MEMORY = {"n": 8, "k": 2}
# What `SMALL_MEMORY` means to midus-hml, in full.
MEMORY_OPTIONS = {"k": 2, "query_norm": "none", "inner_residual": False, "addressing": "content", "n": 8}
MEMORY_OPTIONS |= {"output_projection": False}
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
    """Save a tiny base, with changes of its config; `prefix` begins the names of its decoder's tensors."""
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


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Make these the tensors of a checkpoint, in one file."""
    for path in [*tensor_files(folder), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Set keys of `config.json`; those set to `...` are removed."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(config))
    return config


class Recorder(Progress):
    """Remembers warnings, and stages: name, steps announced, and steps told."""

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
        return [name for name, _, _ in self.stages]

    def told_of(self, name: str) -> list[int]:
        return next(steps for stage, _, steps in self.stages if stage == name)

    @property
    def balanced(self) -> bool:
        return all(sum(report) == announced > 0 for _, announced, report in self.stages)
