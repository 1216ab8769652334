"""Progress that remembers what it was told, and bases that exist only in memory."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from upscalers.architecture.families import family_of
from upscalers.checkpoint.base_model import BaseModel
from upscalers.request.progress import Progress
from upscalers.tensors.solver import Solver, Workplace


class Recorder(Progress):
    """Remembers tasks, their steps and warnings; any thread may tell it."""

    def __init__(self) -> None:
        self.expected: dict[str, int] = {}
        self.steps: Counter[str] = Counter()
        self.ended: list[str] = []
        self.warnings: list[str] = []
        self._lock = threading.Lock()

    def begin(self, task: str, num_steps: int) -> None:
        with self._lock:
            assert task not in self.expected
            self.expected[task] = num_steps

    def step(self, task: str, num_steps: int = 1) -> None:
        with self._lock:
            assert task in self.expected and task not in self.ended
            self.steps[task] += num_steps

    def end(self, task: str) -> None:
        with self._lock:
            self.ended.append(task)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    @property
    def balanced(self) -> bool:
        """Whether every task took the steps it announced, and ended."""
        return self.steps == self.expected and sorted(self.ended) == sorted(self.expected)


class MemoryBase(BaseModel):
    """A base without files: a solver asks it only for names."""

    def layer_names(self, layer: int) -> dict[str, str]:
        return {name: f"{layer}.{name}" for name in self.family.layer_tensors(self.config)}


def memory_base(num_layers: int = 2, **config: Any) -> MemoryBase:
    """A Llama of which there is no more than its config."""
    raw = {"model_type": "llama", "vocab_size": 16, "num_hidden_layers": num_layers, **config}
    return MemoryBase(Path(), raw, family_of(raw), {})


def solved(solver: Solver, scratch: Path, read) -> dict[str, torch.Tensor]:
    """What one solver makes of tensors read by their full name; its progress is in balance."""
    recorder = Recorder()
    made = dict(solver.solve(Workplace(read, scratch, recorder)))
    assert recorder.balanced and recorder.expected.keys() == {solver.label}
    return made
