"""What runs have left: their logs, their weights, and how two runs compare."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.checkpoints import checkpoints_in
from midus_hf.training.run import run_training

# What events say that differs from run to run.
OF_TIME = (
    *("train_runtime", "train_tokens_per_second", "train_samples_per_second", "train_steps_per_second"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"),
)


def events(output: Path, name: str = "loss") -> list[dict[str, Any]]:
    """Return the events of a run's log that have a name; of a run without a model, those up to its latest checkpoint."""
    folder = output if Path(output, "trainer_state.json").exists() else next(iter(checkpoints_in(output).values()))
    history = json.loads(Path(folder, "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [event for event in history if name in event]


def logged(output: Path, name: str = "loss") -> list[Any]:
    return [event[name] for event in events(output, name)]


def by_step(output: Path, name: str) -> dict[int, Any]:
    return {event["step"]: event[name] for event in events(output, name)}


def exact_log(output: Path, name: str = "epoch") -> list[dict[str, Any]]:
    """Return what a log says of the computation, without its last event and times; `loss` leaves evaluations out."""
    of_steps = [event for event in events(output, name) if not {"total_flos", "trained_parameters"} & event.keys()]
    return [{key: value for key, value in event.items() if key not in OF_TIME} for event in of_steps]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def moved(before: Path, after: Path) -> set[str]:
    """Return the names of the tensors that differ between two saved models, which have the same ones in the same dtypes."""
    of_before, of_after = weights(before), weights(after)
    dtypes = [{name: tensor.dtype for name, tensor in each.items()} for each in (of_before, of_after)]
    assert dtypes[0] == dtypes[1]
    return {name for name, tensor in of_before.items() if not torch.equal(tensor, of_after[name])}


def largest_difference(one: Path, other: Path) -> float:
    of_one, of_other = weights(one), weights(other)
    assert of_one.keys() == of_other.keys()
    return max((of_one[name] - tensor).abs().max().item() for name, tensor in of_other.items())


def assert_same_run(one: Path, other: Path) -> None:
    assert exact_log(one) == exact_log(other)
    assert logged(one)
    assert moved(one, other) == set()


def assert_same_checkpoint(one: Path, other: Path) -> None:
    assert (one / "trained.safetensors").read_bytes() == (other / "trained.safetensors").read_bytes()
    levels = [folder.glob("block_states/0/level-*") for folder in (one, other)]
    blocks = [{path.name: path.read_bytes() for path in paths} for paths in levels]
    assert blocks[0] == blocks[1]
    states = [torch.load(folder / "optimizer.pt")["state"] for folder in (one, other)]
    assert states[0]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key][name], states[1][key][name]) for key in states[0] for name in states[0][key])


def bank_of(folder: Path, method: str = "hier-ffn") -> MemoryBank:
    return AutoModelForCausalLM.from_pretrained(folder).banks.bank(method)


def assert_same_blocks(one: MemoryBank, other: MemoryBank, rtol: float = 0.0, atol: float = 0.0) -> None:
    for level in one.layout.levels:
        assert one.written(level) == other.written(level)
        for index in one.written(level):
            torch.testing.assert_close(other.block(level, index), one.block(level, index), rtol=rtol, atol=atol)


def assert_close_weights(one: Path, other: Path) -> None:
    of_one, of_other = weights(one), weights(other)
    assert of_one.keys() == of_other.keys()
    for name, tensor in of_one.items():
        message = f"{name} of {other}: "
        torch.testing.assert_close(of_other[name], tensor, rtol=1e-3, atol=1e-4, msg=message.__add__)


def as_it_was_at(step: int, whole: Path, output: Path) -> Path:
    shutil.copytree(whole, output, ignore=shutil.ignore_patterns("model.safetensors", "memory_bank"))
    (output / "config.json").unlink()
    for number, folder in checkpoints_in(output).items():
        if number > step:
            shutil.rmtree(folder)
    return output


def assert_resumes(
    config_for: Callable[..., TrainArguments], step: int, run: Callable = run_training, **options: Any
) -> Path:
    """Compare an undisturbed run with one that was killed after a checkpoint and resumed; return the latter's output."""
    options = {"save_steps": step, "save_total_limit": None, **options}
    whole = Path(run(config_for("whole", **options)).output)
    parts = as_it_was_at(step, whole, whole.with_name("parts"))
    result = run(config_for("parts", resume_from_checkpoint=True, **options))
    assert result.steps == exact_log(whole, "loss")[-1]["step"] > step
    assert_same_run(parts, whole)
    return parts


def flip(path: Path, byte: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
