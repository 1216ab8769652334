"""FSDP2 on two processes: sharding changes where parameters are, not what a step computes."""

import json
import sys
from pathlib import Path

import pytest
from models.fsdp_worker import CASES
from pairs import by_default, wanted_by_tests
from processes.warm import run_ranks

# Every model holds to these exactly. The mean of two halves is exact too: sharded, each rank adds its half of the
# gradient to the other's, and halving a binary number does not round.
EXACT = (
    "shards_its_memories",
    "every_parameter_has_a_gradient",
    "loss_equals_that_of_its_half",
    "equal_halves_give_the_gradients_of_one",
    "gradients_equal_the_mean_of_the_halves",
)
# One process sums over all tokens of the batch in one go, two over half of them each and then once more: bit equality
# is impossible, and what is left are roundings of float32 (relative, per tensor), 2.5e-6 on one kind of processor.
ROUNDED = {"difference_from_the_whole_batch": 1e-5, "loss_of_the_whole_batch_less_the_mean_of_the_halves": 1e-5}


# A model with head weights of its own and one with tied weights, each with a memory and reading the depth.
USUAL = [case for case in CASES if case.startswith(("llama", "gemma3"))]
FEWEST = ["gemma3", "llama over the depth"]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("fsdp")
    interface = "lo0" if sys.platform == "darwin" else "lo"
    cases = [case for (case,) in wanted_by_tests(request, "case")]
    done = run_ranks(Path(__file__).with_name("fsdp_worker.py"), folder, *cases, GLOO_SOCKET_IFNAME=interface)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", by_default(USUAL, CASES, fewest=FEWEST))
@pytest.mark.parametrize("checkpointing", ["with", "without"])
def test_a_sharded_step_equals_a_whole_one(case, checkpointing, ranks):
    found = [result[case][checkpointing] for result in ranks]
    wrong = [
        (rank, fact, result[fact])
        for rank, result in enumerate(found)
        for fact in (*EXACT, *ROUNDED)
        if not (result[fact] is True if fact in EXACT else result[fact] < ROUNDED[fact])
    ]
    assert wrong == []
