"""Transport between rows: the plan is the one of the definition, whatever the scale and precision."""

import itertools
import math

import pytest
import torch

from upscalers.tensors.transport import assignment, sinkhorn

REGULARIZATION = 0.06


def plan_by_loop(source: torch.Tensor, target: torch.Tensor, reg: float, iterations: int = 5000) -> torch.Tensor:
    """The plan [n, m] of least `<T, M> + reg sum T log T` with uniform marginals, M the distances between rows, in the log domain."""
    cost = (source.double()[:, None] - target.double()[None]).square().sum(-1).sqrt()
    n, m = cost.shape
    f = cost.new_zeros(n)
    for _ in range(iterations):
        g = -reg * (torch.logsumexp((f[:, None] - cost) / reg, dim=0) + math.log(m))
        before, f = f, -reg * (torch.logsumexp((g[None] - cost) / reg, dim=1) + math.log(n))
        if (f - before).abs().max() < 1e-14:
            break
    return torch.exp((f[:, None] + g[None] - cost) / reg)


def barycentric(transport: torch.Tensor) -> torch.Tensor:
    """The plan with columns that sum to one."""
    return transport / transport.sum(0)


def mean_of_sources(transport: torch.Tensor) -> float:
    shares = barycentric(transport)
    return torch.exp(-(shares * shares.clamp_min(1e-300).log()).sum(0)).mean().item()


def rows(n: int, width: int = 16, scale: float = 0.3, seed: int = 0, dtype: torch.dtype = torch.float64):
    return (torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def permuted(source: torch.Tensor, noise: float, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in another order, with noise of this size relative to them, and the order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source), generator=generator)
    noisy = torch.randn(source.shape, generator=generator) * noise * source.std()
    return source[order] + noisy.to(source.dtype), order


def solve(source, target, plan_scale="barycentric", tolerance=1e-9, max_iterations=10000, reg=REGULARIZATION):
    return sinkhorn(source, target, reg, tolerance, max_iterations, plan_scale)


@pytest.mark.parametrize(("n", "m", "scale"), [(24, 24, 0.05), (32, 20, 0.6), (7, 30, 0.3), (1, 5, 0.3), (5, 1, 0.3)])
def test_plan_equals_a_loop_in_the_log_domain(n, m, scale):
    source, target = rows(n, scale=scale), rows(m, scale=scale, seed=1)
    expected = plan_by_loop(source, target, REGULARIZATION)
    actual = solve(source, target, "raw")
    assert actual.residual <= 1e-9
    torch.testing.assert_close(actual.matrix, expected, rtol=1e-5, atol=1e-9 / (n * m))
    torch.testing.assert_close(solve(source, target).matrix, barycentric(expected), rtol=1e-5, atol=1e-9 / n)
    assert actual.effective_sources == pytest.approx(mean_of_sources(expected), rel=1e-5)


@pytest.mark.parametrize("solver", ["sinkhorn", "hungarian"])
def test_raw_plan_has_mass_one(solver):
    source = rows(50, scale=2.0)
    target, order = permuted(source, noise=0.01)
    result = assignment(source, target, "raw") if solver == "hungarian" else solve(source, target, "raw")
    assert result.columns(torch.ones(1, 50, dtype=torch.float64)).sum().item() == pytest.approx(1.0, abs=1e-9)
    assert result.rows(source).norm().item() / source.norm().item() == pytest.approx(1 / 50, rel=1e-6)
    torch.testing.assert_close(result.rows(source), source[order] / 50, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_assignment_recovers_permuted_rows(dtype):
    source = rows(64, 48, dtype=dtype)
    target, order = permuted(source, noise=0.05)
    result = assignment(source, target, "barycentric")
    assert torch.equal(result.permutation, order)
    assert torch.equal(result.rows(source), source[order])
    assert (result.effective_sources, result.residual, result.iterations) == (1.0, 0.0, 1)


def test_assignment_has_the_least_distance():
    source, target = rows(6, 3), rows(6, 3, seed=1)
    cost = torch.cdist(source, target)
    best = min(itertools.permutations(range(6)), key=lambda order: cost[list(order), range(6)].sum())
    assert tuple(assignment(source, target, "barycentric").permutation.tolist()) == best


@pytest.mark.parametrize(("scale", "dtype"), [(15.0, torch.float64), (1e4, torch.float32)], ids=str)
def test_distant_rows_converge(dtype, scale):
    source = rows(48, 32, scale=scale, dtype=dtype)
    distances = torch.cdist(source, source).fill_diagonal_(torch.inf)
    assert distances.min() > 50
    assert torch.exp(-distances.min().double() / REGULARIZATION) == 0
    target, order = permuted(source, noise=1e-4)
    result = solve(source, target, tolerance=1e-4)
    assert result.residual <= 1e-4
    assert (result.rows(source) - source[order]).norm() < 1e-3 * source.norm()
    shifted = solve(source, target + 1e3 * scale / 32**0.5, tolerance=1e-4, max_iterations=200)
    assert shifted.matrix.isfinite().all() and shifted.rows(source).isfinite().all()


@pytest.mark.parametrize("limit", [1, 20, 1100])
def test_iterations_are_limited_and_residual_reported(limit):
    source, target = rows(40, scale=4.0), rows(40, scale=4.0, seed=1)
    result = solve(source, target, tolerance=1e-14, max_iterations=limit)
    assert result.iterations == limit and result.residual > (1e-3 if limit == 1 else 1e-14)
    raw = solve(source, target, "raw", tolerance=1e-14, max_iterations=limit).matrix
    left = (raw.sum(0) - 1 / 40).abs().sum() + (raw.sum(1) - 1 / 40).abs().sum()
    assert result.residual == pytest.approx(left.item(), rel=1e-9 if limit == 1 else 1e-3)


@pytest.mark.parametrize("n", [3, 1100])  # fewer and more columns than are taken at once
def test_effective_sources_count_the_sources(n):
    same = torch.zeros(n, 4, dtype=torch.float64)
    assert solve(same, same).effective_sources == pytest.approx(n)
    assert solve(same, same, "raw").effective_sources == pytest.approx(n)
    apart = torch.arange(n, dtype=torch.float64)[:, None] * 100
    assert solve(apart, apart.flip(0)).effective_sources == pytest.approx(1.0)
    assert solve(apart, apart.flip(0), "raw").effective_sources == pytest.approx(1.0)
