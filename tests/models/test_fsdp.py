"""FSDP2 on two processes: sharding changes where parameters are, not what a step computes.

As a program this file is one rank, which writes what it found as JSON. Arguments: a folder, and names of `CASES`.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))  # for scripts
sys.path.insert(0, str(Path(__file__).parents[1]))

from models.gradients import enable_checkpointing, loss_and_gradients
from models.memory_models import depth_model
from models.upscaled import upscaled_model
from tiny import FAMILIES, prompt

# What makes each model, and a parameter of its memory.
CASES = {family: (partial(upscaled_model, family), "layers.1.memory.value_bank") for family in FAMILIES}
for family, kind in (("llama", "reused"), ("gemma3", "default")):
    value = "layers.1.memories.depth-attention.ffn_value.weight"
    CASES[f"{family} over the depth"] = partial(depth_model, family, kind, torch.float32), value


def step(model, tokens):
    loss, gradients = loss_and_gradients(model, tokens)
    return loss, {name: of.full_tensor() if hasattr(of, "full_tensor") else of for name, of in gradients.items()}


def findings(case, checkpointing):
    """Return what holds for a model's sharded steps next to whole ones on halves of a batch."""
    (build, memory), rank, ranks = CASES[case], dist.get_rank(), dist.get_world_size()
    halves, whole, sharded = prompt(batch=4).chunk(2), build().train(), build().train()
    expected = [step(whole, tokens) for tokens in halves]
    (_, first), (_, second) = expected
    if checkpointing:
        enable_checkpointing(sharded, use_reentrant=False)
    for module in (*sharded.model.layers, sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    bank = sharded.model.get_parameter(memory)
    (loss, gradients), (_, of_one_half) = step(sharded, halves[rank]), step(sharded, halves[0])
    mean = {name: first[name] / 2 + second[name] / 2 for name in gradients}
    return {
        "its memories are sharded": bank.to_local().shape[0] * ranks == bank.shape[0],
        "every parameter has a gradient": gradients.keys() == dict(sharded.named_parameters()).keys(),
        "the loss is that of its half": torch.equal(loss, expected[rank][0]),
        "equal halves give the gradients of one": all(torch.equal(of_one_half[name], first[name]) for name in first),
        "gradients are the mean of those of halves": all(torch.equal(gradients[name], mean[name]) for name in mean),
    }


def main(folder, *cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {case: {how: findings(case, how == "with") for how in ("with", "without")} for case in cases}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
else:
    import pytest
    from pairs import by_default, wanted_by_tests
    from processes.warm import run_ranks

    # A model with head weights of its own and one with tied weights, each with a memory and reading the depth.
    USUAL = [case for case in CASES if case.startswith(("llama", "gemma3"))]

    @pytest.fixture(scope="module")
    def ranks(request, tmp_path_factory):
        folder, interface = tmp_path_factory.mktemp("fsdp"), "lo0" if sys.platform == "darwin" else "lo"
        cases = [case for (case,) in wanted_by_tests(request, "case")]
        done = run_ranks(Path(__file__), folder, *cases, GLOO_SOCKET_IFNAME=interface)
        assert done.returncode == 0, done.stderr
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    @pytest.mark.parametrize("case", by_default(USUAL, CASES, fewest=["gemma3", "llama over the depth"]))
    @pytest.mark.parametrize("checkpointing", ["with", "without"])
    def test_sharded_step_equals_a_whole_one(case, checkpointing, ranks):
        found = [result[case][checkpointing] for result in ranks]
        assert [[fact for fact, holds in of_rank.items() if not holds] for of_rank in found] == [[], []]
        assert len(found[0]) == 5
