"""OpT-DeUS makes the blocks of its definition, by plans that are those of a loop."""

import math
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import in_turn

from tests.upscalers.checkpoints import Recorder, save_base, write_tensors
from tests.upscalers.contents import config_of, layer, read_tensors, record_of
from tests.upscalers.methods import upscaled
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.tensors.transport import assignment, sinkhorn

Tensors = dict[str, torch.Tensor]
PRE_NORM = ("llama", "qwen2", "qwen3", "mistral")
# Families whose norms multiply by 1 + weight.
UNIT_OFFSET = ("gemma2", "gemma3")
# What stands in front of the feed-forward network; OLMo2 has nothing there.
MLP_NORM = {
    **dict.fromkeys(PRE_NORM, "post_attention_layernorm.weight"),
    **dict.fromkeys(UNIT_OFFSET, "pre_feedforward_layernorm.weight"),
}
OUTPUT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


def block(family: str, first: Tensors, second: Tensors, **changes: Any) -> Tensors:
    """The new block between two layers, float64, by the tensors' names within it."""
    usual = {"solver": "sinkhorn", "plan_scale": "barycentric", "regularization": 0.06, "mlp_t_in": "o_proj"}
    settings = SimpleNamespace(**usual | {"identity": "auto"} | changes)
    first, second = ({name: tensor.double() for name, tensor in layer.items()} for layer in (first, second))
    raw, made = settings.plan_scale == "raw", {name: (first[name] + second[name]) / 2 for name in first}

    def plan(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if settings.solver == "hungarian":
            exact = exact_plan(source, target)
            return exact if raw else exact * len(target)
        transport = plan_by_loop(source, target, settings.regularization)
        return transport if raw else barycentric(transport)

    def fuse(name: str, source: torch.Tensor) -> torch.Tensor:
        t = plan(source, second[f"{name}.weight"])
        made[f"{name}.weight"] = (t.mT @ source + second[f"{name}.weight"]) / 2
        if f"{name}.bias" in first and not raw:
            made[f"{name}.bias"] = (t.mT @ first[f"{name}.bias"] + second[f"{name}.bias"]) / 2
        return t

    for letter in "qkv":
        t = fuse(f"self_attn.{letter}_proj", first[f"self_attn.{letter}_proj.weight"])
        norm = f"self_attn.{letter}_norm.weight"
        if family == "olmo2" and letter in "qk":
            made[norm] = ((t / t.sum(0)).mT @ first[norm] + second[norm]) / 2
    t_o = fuse("self_attn.o_proj", first["self_attn.o_proj.weight"])
    t_r = (t_o + torch.eye(len(t_o), dtype=torch.float64)) / 2
    if family in MLP_NORM:
        norm, offset = MLP_NORM[family], 1.0 if family in UNIT_OFFSET else 0.0
        made[norm] = ((first[norm] + offset) @ t_r + second[norm] + offset) / 2 - offset
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        fuse(name, first[f"{name}.weight"] @ (t_o if settings.mlp_t_in == "o_proj" else t_r))
    fuse("mlp.down_proj", first["mlp.down_proj.weight"])
    if settings.identity == "zero_out_proj" or (settings.identity == "auto" and family in PRE_NORM):
        for name in made:
            if name.startswith(("self_attn.o_proj", "mlp.down_proj")):
                made[name] = torch.zeros_like(made[name])
    elif settings.identity != "none":
        for name in OUTPUT_NORMS:
            made[name] = torch.full_like(made[name], -1.0 if family in UNIT_OFFSET else 0.0)
    return made


def exact_plan(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The permutation of least total distance as a plan of mass one, by linear programming."""
    from scipy.optimize import linprog
    from scipy.sparse import eye, kron, vstack

    n, cost = len(source), (source[:, None] - target[None]).square().sum(-1).sqrt()
    ones, identity = torch.ones(1, n).numpy(), eye(n)
    marginals = vstack([kron(identity, ones), kron(ones, identity)])
    solution = linprog(cost.flatten().numpy(), A_eq=marginals, b_eq=torch.full((2 * n,), 1 / n).numpy())
    assert solution.status == 0
    return torch.from_numpy(solution.x).view(n, n).mul(n).round().div(n)


OPTIONS = {
    "default": {}, "residual mean": {"mlp_t_in": "residual_mean"},
    "raw residual mean": {"plan_scale": "raw", "mlp_t_in": "residual_mean"}, "raw": {"plan_scale": "raw"},
    "no identity": {"identity": "none"}, "zero projections": {"identity": "zero_out_proj"},
    "other regularization": {"regularization": 0.2}, "exact": {"solver": "hungarian", "identity": "none"},
}  # fmt: skip
BIASES = {family: {"attention_bias": True} for family in ("llama", "qwen3", "gemma2", "gemma3", "olmo2")}
BIASES["llama"]["mlp_bias"] = True
# The weights of tiny models lie so close that any plan is nearly uniform: multiplied by this, plans have a shape.
SHARPER = 8


@pytest.fixture(scope="module")
def sharp_base(tmp_path_factory):
    """A base with distances between rows well above the regularization; read-only."""

    @cache
    def saved(family: str, biases: bool = False):
        folder = tmp_path_factory.mktemp("base") / f"{family}{biases}"
        save_base(folder, family, **(BIASES[family] if biases else {}))
        tensors = read_tensors(folder)
        matrices = {name: t * SHARPER for name, t in tensors.items() if t.dim() == 2 and ".layers." in name}
        write_tensors(folder, tensors | matrices)
        return folder

    return saved


def made(base, output, family, changes: dict, **options) -> tuple[dict, dict]:
    """The new block that stands at 2, and the one of the definition, from the base layers on both sides."""
    upscaled(base, output, "opt-deus", placement="2", options={**changes, "tolerance": 1e-9, **options})
    before = read_tensors(base)
    return layer(read_tensors(output), 2), block(family, layer(before, 1), layer(before, 2), **changes)


def compare(results: dict, expected: dict, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert results.keys() == expected.keys()
    for name, tensor in results.items():
        say = f"{name}: {{}}".format
        torch.testing.assert_close(tensor.double(), expected[name], rtol=rtol, atol=atol, msg=say)


@pytest.mark.parametrize("options", OPTIONS)
def test_opt_deus_block_equals_its_definition(native_family, options, sharp_base, tmp_path):
    compare(*made(sharp_base(native_family), tmp_path / "out", native_family, OPTIONS[options]))


@pytest.mark.parametrize(("family", "options"), in_turn(BIASES, ["default", "raw", "no identity"]))
def test_biases_follow_the_rows_they_belong_to(family, options, sharp_base, tmp_path):
    actual, expected = made(sharp_base(family, True), tmp_path / "out", family, OPTIONS[options])
    assert any(name.endswith(".bias") and tensor.any() for name, tensor in actual.items())
    compare(actual, expected)


def test_single_precision_is_nearly_the_same(sharp_base, tmp_path):
    options = {"precision": "float32", "tolerance": 1e-4}
    compare(*made(sharp_base("gemma3"), tmp_path / "out", "gemma3", {}, **options), rtol=1e-3, atol=1e-3)


SOLVED = ["query", "key", "value", "output_projection", "gate", "up"]
COLUMNS = ["norm_ratio", "effective_sources", "iterations", "residual", "seconds"]
WEAK = r"matched rows keep little of their norm \(.*\): .* solver=hungarian keeps the norm\."
LATE = (
    r"Sinkhorn did not converge for \w+(, \w+)+ of new layers 2, 4: residual up to (?P<worst>0\.\d+) after 1 iterations, "
    r"expected at most 0\.0001\. Raise max_iterations"
)


def fused(base, output, **options):
    recorder = Recorder()
    return upscaled(base, output, "opt-deus", options=options, progress=recorder), recorder


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_solved_matrices_are_measured_and_weak_ones_warned_of(family, shared_base, tmp_path):
    base = shared_base(family)
    report, recorder = fused(base, tmp_path / "out", tolerance=1e-9)
    roles = SOLVED if family in PRE_NORM else [*SOLVED, "down"]
    assert [(row["layer"], row["tensor"]) for row in report.measurements] == [(i, r) for i in (2, 4) for r in roles]
    assert all(list(row)[2:] == COLUMNS for row in report.measurements)
    assert recorder.balanced
    assert {*recorder.names} >= {"fusing layer 2", "fusing layer 4"}
    (weak,) = (warning for warning in recorder.warnings if re.fullmatch(WEAK, warning))
    for role in roles:
        weakest = min(row["norm_ratio"] for row in report.measurements if row["tensor"] == role)
        assert (f"{role} {weakest:.2g}" in weak) == (weakest < 0.3), role
    if family not in PRE_NORM:
        return
    assert recorder.warnings == [weak]
    before, new = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    rows = {row["tensor"]: row for row in report.measurements if row["layer"] == 2}
    for role in ("query", "key", "value", "gate", "up"):
        name = f"self_attn.{role[0]}_proj.weight" if role in ("query", "key", "value") else f"mlp.{role}_proj.weight"
        source, target = (layer(before, index)[name].double() for index in (1, 2))
        # To the previous layer's matrix, not to what the output projection's plan left of it, which may be next to nothing.
        ratio = ((2 * new[name].double() - target).norm() / source.norm()).item()
        assert rows[role]["norm_ratio"] == pytest.approx(ratio, rel=1e-3)
        if name.startswith("self_attn"):
            plan = plan_by_loop(source, target, 0.06)
            ratio = ((barycentric(plan).mT @ source).norm() / source.norm()).item()
            assert rows[role]["norm_ratio"] == pytest.approx(ratio, rel=1e-5)
            assert rows[role]["effective_sources"] == pytest.approx(mean_of_sources(plan), rel=1e-5)
            assert rows[role]["residual"] <= 1e-9
            assert rows[role]["iterations"] >= 1
            assert rows[role]["seconds"] >= 0


def test_release_preset_gives_half_the_next_layer(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    base = save_base(tmp_path / "base", **sizes)
    report, recorder = fused(base, tmp_path / "out", preset="release")
    before, actual = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    previous, following = layer(before, 1), layer(before, 2)
    norm, both = "post_attention_layernorm.weight", "input_layernorm.weight"
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    expected = {f"{name}.weight": following[f"{name}.weight"] / 2 for name in names}
    expected[norm] = 0.25 * previous[norm] + 0.5 * following[norm]
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= 1e-2 * tensor.norm()
    assert not actual["self_attn.o_proj.weight"].any()
    assert not actual["mlp.down_proj.weight"].any()
    torch.testing.assert_close(actual[both], (previous[both] + following[both]) / 2)
    assert all(row["norm_ratio"] <= 1 / 128 for row in report.measurements)
    assert recorder.warnings == []  # a raw plan shrinks by design
    release = {"plan_scale": "raw", "regularization": 0.06, "mlp_t_in": "o_proj", "solver": "sinkhorn"}
    assert config_of(tmp_path / "out")["upscale"]["options"].items() >= release.items()


@pytest.mark.parametrize("options", [{"solver": "hungarian"}, {"plan_scale": "raw"}, {"regularization": 1e-4}])
def test_kept_norm_is_not_warned_of(options, base, tmp_path):
    _, recorder = fused(base, tmp_path / "out", max_iterations=2000, tolerance=1.9, **options)
    assert recorder.warnings == []


def test_unconverged_transport_is_warned_of(base, tmp_path):
    report, recorder = fused(base, tmp_path / "out", max_iterations=1, plan_scale="raw")
    (late,) = filter(None, (re.match(LATE, warning) for warning in recorder.warnings))
    assert late["worst"] == f"{max(row['residual'] for row in report.measurements):.2g}"


def test_measurements_are_recorded_and_shown(base, tmp_path, command):
    columns = ["norm ratio", "effective sources", "iterations", "residual"]
    usual = ("--base", base, "--method", "opt-deus", "--output", tmp_path / "out", "--no-verify")
    outcome = command(*usual).succeeded()
    rows = record_of(tmp_path / "out")["measurements"]
    assert list(rows[0]) == ["layer", "tensor", *(column.replace(" ", "_") for column in columns), "seconds"]
    assert rows == inspect_checkpoint(tmp_path / "out")["measurements"]
    assert rows == command("inspect", tmp_path / "out", "--json").json()["measurements"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| tensor | layers | {' | '.join(columns)} |\n" in card
    ratios = [row["norm_ratio"] for row in rows if row["tensor"] == "key"]
    assert f"| key | 2 | {sum(ratios) / 2:.3g} ({min(ratios):.3g} to {max(ratios):.3g}) |" in card
    for table in (outcome.out, command("inspect", tmp_path / "out").out):
        assert columns[0] in table
        assert f"{sum(ratios) / 2:.3g}" in table
    assert "measurements" not in command(*usual, "--overwrite", "--json").json()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("solver", "package", "name"), [("sinkhorn", "ot", "POT"), ("hungarian", "scipy", "scipy")])
def test_missing_solver_package_is_named(solver, package, name, base, tmp_path, command, refused, without):
    without(package)
    other = "hungarian" if solver == "sinkhorn" else "sinkhorn"
    usual, output = ("--base", base, "--method", "opt-deus", "--set"), ("--output", tmp_path / "out", "--no-verify")
    message = f"solver {solver} needs {name}, which is not installed; in the clone of midus_hf, run: "
    refused(command(*usual, f"solver={solver}", *output), message, [])
    dry = command(*usual, f"solver={solver}", "--set", "device=cuda", "--dry-run")  # it may plan for another machine
    assert (dry.status, dry.err) == (0, "")
    assert command(*usual, f"solver={other}", *output).status == 0


REGULARIZATION = 0.06


def plan_by_loop(source: torch.Tensor, target: torch.Tensor, reg: float, iterations: int = 5000) -> torch.Tensor:
    """The plan [n, m] of least `<T, M> + reg sum T log T`, uniform, in the log domain."""
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_assignment_recovers_permuted_rows(dtype):
    source = rows(64, 48, dtype=dtype)
    target, order = permuted(source, noise=0.05)
    for scale in (1, 64):  # with the raw scale the plan has mass one
        result = assignment(source, target, "barycentric" if scale == 1 else "raw")
        assert torch.equal(result.permutation, order), scale
        assert torch.equal(result.rows(source) * scale, source[order])
        assert (result.effective_sources, result.residual, result.iterations) == (1.0, 0.0, 1), scale


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
    assert shifted.matrix.isfinite().all()
    assert shifted.rows(source).isfinite().all()


@pytest.mark.parametrize("limit", [1, 20, 1100])
def test_iterations_are_limited_and_residual_reported(limit):
    source, target = rows(40, scale=4.0), rows(40, scale=4.0, seed=1)
    result = solve(source, target, tolerance=1e-14, max_iterations=limit)
    assert result.iterations == limit
    assert result.residual > (1e-3 if limit == 1 else 1e-14)
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
