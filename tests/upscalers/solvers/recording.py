"""Progress that remembers what it was told, and bases that exist only in memory."""

from pathlib import Path
from typing import Any

import torch

from upscalers.architecture.families import family_of
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.request.progress import Progress
from upscalers.tensors.solver import Scratch, Solver


class Recorder(Progress):
    """Remembers whether it was shown, warnings, and stages: name, steps announced, and steps told one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.stages: list[tuple[str, int, list[int]]] = []
        self.warnings: list[str] = []

    def start(self) -> None:
        self.shown.append("start")

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        self.stages.append((name, num_steps, []))

    def advance(self, num_steps: int = 1) -> None:
        self.stages[-1][2].append(num_steps)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def finish(self) -> None:
        self.shown.append("finish")

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


class MemoryBase(BaseCheckpoint):
    """A base without files: a solver asks it only for names."""

    @property
    def layer_names(self) -> list[dict[str, str]]:
        return [{name: f"{layer}.{name}" for name in tensors} for layer, tensors in enumerate(self.layout.layers)]


def memory_base(num_layers: int = 2, **config: Any) -> MemoryBase:
    """A Llama of which there is no more than its config."""
    raw = {"model_type": "llama", "vocab_size": 16, "num_hidden_layers": num_layers, **config}
    family = family_of(raw)
    return MemoryBase(Path(), raw, family, layout_of(raw), {})


def solved(solver: Solver, scratch: Path, read) -> dict[str, torch.Tensor]:
    """What one solver makes of tensors read by their full name; its progress is in balance."""
    recorder = Recorder()
    made = dict(solver.solve(Scratch(read, scratch, recorder)))
    assert recorder.balanced and len(recorder.stages) == 1
    return made
