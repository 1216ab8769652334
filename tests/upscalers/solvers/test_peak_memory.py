"""A solver's peak memory is at most what it states, which the number of workers is chosen by."""

import json
from functools import cache
from pathlib import Path

import pytest
from pairs import by_default
from processes.warm import run_warm

REPOSITORY = Path(__file__).parents[3]
# For what does not grow with the matrices.
CONSTANT_BYTES = 8_000_000
# The C library gives memory back as soon as it is free (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): what a solver holds is
# counted, not what the library keeps.
PROGRAM = """
import ctypes, runpy
if hasattr(ctypes.CDLL(None), "mallopt"):
    assert ctypes.CDLL(None).mallopt(-3, 65536) and ctypes.CDLL(None).mallopt(-1, 65536)
runpy.run_module("tests.upscalers.solvers.peak_memory", run_name="__main__")
"""

# A predictor that takes no memory to speak of.
SMALL = {"epochs": 1, "batch_size": 1024, "hidden_size": 16}

CASES = [
    ("opt-deus", 256, 1536, {}),
    ("opt-deus", 512, 1536, {"precision": "float32", "identity": "none"}),
    ("opt-deus", 1024, 1024, {"mlp_t_in": "residual_mean", "identity": "none"}),
    ("opt-deus", 512, 2048, {"solver": "hungarian", "identity": "none"}),
    ("lesa", 1024, 1024, SMALL),
    ("lesa", 768, 3072, SMALL),
    ("lesa", 1536, 512, SMALL),
]
# One of each solver, which are measured by default.
QUICK = (0, 6)


@cache
def measured(cases: tuple[int, ...]) -> list[dict[str, int]]:
    """Growth and statement of some cases, in bytes."""
    path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    done = run_warm(PROGRAM, json.dumps([CASES[case] for case in cases]), folder=REPOSITORY, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", by_default(QUICK, range(len(CASES))), ids=[f"{case[0]} {case[1:]}" for case in CASES])
def test_a_solver_holds_no_more_than_it_states(case):
    together = QUICK if case in QUICK else tuple(other for other in range(len(CASES)) if other not in QUICK)
    found = measured(together)[together.index(case)]
    assert found["stated"] > 4 * CONSTANT_BYTES
    assert found["growth"] <= found["stated"] + CONSTANT_BYTES, f"{found['growth'] / found['stated']:.2f} times"
    assert found["growth"] > found["stated"] / 5  # a statement far too high would keep processors idle
