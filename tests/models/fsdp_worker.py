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

from models.depth_models import depth_model
from models.gradients import enable_checkpointing
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


def loss_and_gradients(model, tokens: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    return loss.detach(), gradients


def largest_relative_difference(results: Gradients, expected: Gradients) -> float:
    return max(((results[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


def findings(case: str) -> dict[str, dict[str, float | bool]]:
    """Return how a model's sharded steps, with and without checkpointing, compare with whole ones on halves and all of a batch."""
    halves = prompt(batch=4).chunk(2)
    whole = CASES[case][0]().train()
    expected = [loss_and_gradients(whole, tokens) for tokens in (*halves, torch.cat(halves))]
    return {how: of_sharded(case, how == "with", halves, expected) for how in ("with", "without")}


def of_sharded(
    case: str, checkpointing: bool, halves: tuple[torch.Tensor, ...], expected: list[tuple[torch.Tensor, Gradients]]
) -> dict[str, float | bool]:
    """Return how a sharded step compares with the `expected` whole ones on the halves and on all of the batch."""
    rank = dist.get_rank()
    build, memory = CASES[case]
    first, second, all_of_it = expected
    sharded = build().train()
    if checkpointing:
        enable_checkpointing(sharded, use_reentrant=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    bank: Any = sharded.model.get_parameter(memory)
    loss, gradients = loss_and_gradients(sharded, halves[rank])
    _, gradients_of_one_half = loss_and_gradients(sharded, halves[0])
    return {
        "shards_its_memories": bank.to_local().shape[0] * dist.get_world_size() == bank.shape[0],
        "every_parameter_has_a_gradient": gradients.keys() == first[1].keys(),
        "loss_equals_that_of_its_half": torch.equal(loss, (first, second)[rank][0]),
        "equal_halves_give_the_gradients_of_one": all(
            torch.equal(gradient, first[1][name]) for name, gradient in gradients_of_one_half.items()
        ),
        "gradients_equal_the_mean_of_the_halves": all(
            torch.equal(gradient, first[1][name] / 2 + second[1][name] / 2) for name, gradient in gradients.items()
        ),
        "difference_from_the_whole_batch": largest_relative_difference(gradients, all_of_it[1]),
        "loss_of_the_whole_batch_less_the_mean_of_the_halves": abs((all_of_it[0] - (first[0] + second[0]) / 2).item()),
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
