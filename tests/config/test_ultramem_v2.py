"""UltraMemV2: which tables layers read, and best scores at the start, against a simulation."""

import pytest
import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.module import build_memory
from midus_hf.memories.ultramem_v2.options import MEASURED, UltraMemV2Options, UniformCores, best_scores

LAYERS = 24
# Tables that layers of `ring:4` read, both counted from 1.
TABLE_10 = {1: {24, 1, 2, 3}, 2: {1, 2, 3, 4}, 3: {2, 3, 4, 5}, 4: {3, 4, 5, 6}, 5: {4, 5, 6, 7}, 24: {23, 24, 1, 2}}


def tables_read(share: str, layer: int) -> set[int]:
    """The tables, counted from 1, that a layer, counted from 1, reads."""
    options = UltraMemV2Options(n=8, k=2, share=share)
    stored = 1 if share == "all" else LAYERS
    first = options.first_row(layer - 1, stored * 64) // 64
    return {(first + number) % stored + 1 for number in range(options.group)}


@pytest.mark.parametrize("group", [1, 2, 3, 9, 12])
def test_ring_layers_read_their_own_and_neighbours_tables(group):
    read = [tables_read(f"ring:{group}", layer) for layer in range(1, LAYERS + 1)]
    assert all(layer in tables and len(tables) == group for layer, tables in enumerate(read, 1))
    assert all(sum(table in tables for tables in read) == group for table in range(1, LAYERS + 1))
    assert {layer: tables_read("ring:4", layer) for layer in TABLE_10} == TABLE_10
    assert tables_read("all", 7) == {1}
    options, total = UltraMemV2Options(n=8, k=2, share=f"ring:{group}"), LAYERS * 64
    starts = [options.first_row(layer, total) for layer in range(LAYERS)]
    assert {(start + row) % total for start in starts for row in range(options.num_rows)} == set(range(total))


# n, r, keys of a side that are kept, k.
RETRIEVALS = {
    "default": (128, 2, 32, 32), "rank-1": (64, 1, 16, 16), "every-slot": (8, 2, 8, 64), "kept": (40, 2, 5, 25),
}  # fmt: skip


def simulated(n: int, r: int, side: int, k: int, trials: int = 300) -> tuple[float, float]:
    """Mean and variance of the chosen scores (appendix B.2): keys score as standard normals."""
    generator, chosen = torch.Generator().manual_seed(1), []
    for _ in range(trials):
        rows, columns = torch.randn(2, n, r, generator=generator)
        u, values, vh = torch.linalg.svd(torch.rand(r, r, generator=generator))
        core, sign = u @ torch.diag(values / values[0]) @ vh, u[:, 0].sum().sign()
        kept_rows = rows[(rows @ u[:, 0] * sign).topk(side).indices]
        kept_columns = columns[(columns @ vh[0] * sign).topk(side).indices]
        chosen.append((kept_rows @ core @ kept_columns.T).flatten().topk(k).values)
    every = torch.stack(chosen)
    return every.mean().item(), every.var().item()


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_best_scores_match_a_simulation(retrieval):
    result, (mean, variance) = best_scores(*RETRIEVALS[retrieval]), simulated(*RETRIEVALS[retrieval])
    assert result.mean == pytest.approx(mean, rel=0.06, abs=0.06)
    assert result.variance == pytest.approx(variance, rel=0.2)


def test_best_scores_do_not_depend_on_the_generator():
    expected = best_scores(16, 2, 4, 8)
    MEASURED.clear()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert best_scores(16, 2, 4, 8) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_cores_start_positive_with_norm_one(rank):
    core = torch.empty(3, 2, 2, rank, rank)
    UniformCores().fill(core, torch.Generator().manual_seed(0))
    assert (core >= 0).all()
    torch.testing.assert_close(torch.linalg.matrix_norm(core, 2), torch.ones(3, 2, 2))
    again = torch.empty(3, 2, 2, rank, rank, dtype=torch.bfloat16)
    UniformCores().fill(again, torch.Generator().manual_seed(0))
    assert torch.equal(again, core.bfloat16())


# Layers of the model, and options.
KINDS = {"rank-1": (24, {"rank": 1}), "heads": (24, {"heads": 2}), "no-pre-values": (64, {"pre_value_width": 0})}
KINDS["every-key-kept"] = (24, {"k": 64})


@pytest.mark.parametrize("kind", KINDS)
def test_initial_scores_and_outputs_have_the_papers_scale(kind):
    (depth, changes), inner, hidden = KINDS[kind], 3, 128
    sizes = ModelSizes(hidden_size=hidden, num_heads=4, intermediate_size=inner * hidden, num_layers=depth)
    sides = {"n": 64, "k": 16, "value_width": 64, "pre_value_width": 64, "zero": "none"}
    options, scores, squares = UltraMemV2Options(**{**sides, **changes}), [], []
    for seed in range(6):
        torch.manual_seed(seed)
        memory, states = build_memory(options, sizes), torch.randn(1, 256, hidden)
        with torch.no_grad():
            scores.append(memory.retrieve(states)[0].mean().item())
            squares.append(memory(states).square().mean().item())
    assert sum(scores) / len(scores) == pytest.approx(1, rel=0.1)
    assert sum(squares) / len(squares) == pytest.approx(0.064 * inner / (2 * depth), rel=0.12)
