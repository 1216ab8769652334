"""FSDP2 on two processes: sharding changes where parameters are, not what a step computes."""

import json
import sys
from pathlib import Path

import pytest
from models.fsdp_worker import CASES
from pairs import by_default, wanted_by_tests
from processes.warm import run_ranks

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
    assert [[fact for fact, holds in of_rank.items() if not holds] for of_rank in found] == [[], []]
    assert len(found[0]) == 5
