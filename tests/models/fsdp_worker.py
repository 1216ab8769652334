"""One rank of the FSDP2 tests: trains a step sharded, and the same step whole, and reports how they differ.

Arguments: a folder, where each rank writes its findings as JSON, and names of `CASES`.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.gradients import enable_checkpointing, loss_and_gradients
from models.memory_models import depth_model
from models.upscaled import upscaled_model
from tiny import FAMILIES, prompt

Gradients = dict[str, torch.Tensor]

# What makes each model, and a parameter of its memory.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    **{family: (partial(upscaled_model, family), "layers.1.memory.value_bank") for family in FAMILIES},
    **{
        f"{family} over the depth": (
            partial(depth_model, family, kind, torch.float32),
            "layers.1.memories.depth-attention.ffn_value.weight",
        )
        for family, kind in (("llama", "reused"), ("gemma3", "default"))
    },
}


def step(model, tokens: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    """Return the loss of tokens and whole gradients."""
    loss, gradients = loss_and_gradients(model, tokens)
    return loss, {name: of.full_tensor() if hasattr(of, "full_tensor") else of for name, of in gradients.items()}


def findings(case: str) -> dict[str, dict[str, bool]]:
    """Return what holds for a model's sharded steps, with and without checkpointing, beside whole ones on halves of a batch."""
    halves = prompt(batch=4).chunk(2)
    whole = CASES[case][0]().train()
    expected = [step(whole, tokens) for tokens in halves]
    return {how: of_sharded(case, how == "with", halves, expected) for how in ("with", "without")}


def of_sharded(
    case: str, checkpointing: bool, halves: tuple[torch.Tensor, ...], expected: list[tuple[torch.Tensor, Gradients]]
) -> dict[str, bool]:
    """Return what holds for sharded steps. The mean of two halves is exact too: halving a binary number does not round."""
    rank = dist.get_rank()
    build, memory = CASES[case]
    (_, first), (_, second) = expected
    sharded = build().train()
    if checkpointing:
        enable_checkpointing(sharded, use_reentrant=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    bank: Any = sharded.model.get_parameter(memory)
    loss, gradients = step(sharded, halves[rank])
    _, of_one_half = step(sharded, halves[0])
    return {
        "its memories are sharded": bank.to_local().shape[0] * dist.get_world_size() == bank.shape[0],
        "every parameter has a gradient": gradients.keys() == dict(sharded.named_parameters()).keys(),
        "the loss is that of its half": torch.equal(loss, expected[rank][0]),
        "equal halves give the gradients of one": all(
            torch.equal(gradient, first[name]) for name, gradient in of_one_half.items()
        ),
        "gradients are the mean of those of the halves": all(
            torch.equal(gradient, first[name] / 2 + second[name] / 2) for name, gradient in gradients.items()
        ),
    }


def main(folder: Path, *cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {case: findings(case) for case in cases}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
