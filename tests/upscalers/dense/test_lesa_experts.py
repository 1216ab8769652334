"""LESA where a layer has several matrices of one role, as a mixture of experts has: each is predicted on its own."""

import dataclasses
import threading
import zlib
from pathlib import Path

import pytest
import torch

from tests.upscalers.solvers.recording import MemoryBase, memory_base, solved
from upscalers.architecture.family import Family, LayerTensor
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.methods.contract import get_method
from upscalers.plan.plan import Base, New, Plan
from upscalers.request.options import parse_options
from upscalers.request.progress import Progress
from upscalers.solvers import layer_predictor
from upscalers.tensors.solver import Solved, Solver, Workplace, solve_all

EXPERTS = [f"mlp.experts.{expert}.gate_proj" for expert in range(2)]
SHAPE = (12, 8)
# Seconds after which two solvers that were to work at once count as working one after the other.
PATIENCE = 30


class TwoExperts(Family):
    """A family whose layers have two gates."""

    def layer_tensors(self, config, layer=0):
        own = {
            name: tensor for name, tensor in super().layer_tensors(config, layer).items() if "gate_proj" not in name
        }
        return own | {f"{name}.weight": LayerTensor("gate", SHAPE) for name in EXPERTS}


def gate_solvers() -> dict[Solver, str]:
    """The solvers of the two gates, with the name of the matrix that each makes."""
    llama = memory_base(4, hidden_size=SHAPE[1], intermediate_size=SHAPE[0], num_attention_heads=2)
    family = TwoExperts(**{field.name: getattr(llama.family, field.name) for field in dataclasses.fields(Family)})
    layers = [f"{layer}.{name}" for layer in range(4) for name in family.layer_tensors(llama.config)]
    shapes = {name: family.layer_tensors(llama.config)[name.partition(".")[2]].shape for name in layers}
    base = MemoryBase(Path(), llama.config, family, {name: StoredTensor("F32", shapes[name]) for name in layers})
    options = parse_options(get_method("lesa").options_class, {"epochs": 2, "workers": 2}, "lesa")
    plan = Plan((Base(0), Base(1), New(1, 2, (2, 1)), Base(2), Base(3)), 4)
    recipes = get_method("lesa")(options).recipes(base, plan, 0)[2]
    gates = {name: recipes[f"{name}.weight"] for name in EXPERTS}
    assert all(isinstance(recipe, Solved) for recipe in gates.values())
    return {recipe.solver: name for name, recipe in gates.items()}


def weights(name: str) -> torch.Tensor:
    """What each expert of each layer holds: nobody else has the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(SHAPE, generator=generator) * 0.02


@pytest.fixture
def both_at_work(monkeypatch):
    """No solver begins to train before both have stored their coordinates."""
    together, honest = threading.Barrier(2, timeout=PATIENCE), layer_predictor.train_predictor

    def train(*arguments):
        together.wait()
        return honest(*arguments)

    return lambda: monkeypatch.setattr(layer_predictor, "train_predictor", train)


def test_two_solvers_of_one_role_at_work_at_once_make_what_each_makes_alone(both_at_work, tmp_path):
    alone = {name: solved(solver, tmp_path, weights)["2"] for solver, name in gate_solvers().items()}
    assert not torch.allclose(*alone.values())
    both_at_work()
    solvers, made = gate_solvers(), {}
    solve_all(
        list(solvers),
        Workplace(weights, tmp_path, Progress()),
        lambda solver, key, tensor: made.update({solvers[solver]: tensor}),
    )
    assert made.keys() == alone.keys()
    for name in EXPERTS:
        assert torch.equal(made[name], alone[name]), name
    assert not any(tmp_path.iterdir())


def test_each_is_called_by_its_name_in_progress_and_measurements(tmp_path):
    for solver, name in gate_solvers().items():
        solved(solver, tmp_path, weights)
        assert solver.label == name
        assert [row["tensor"] for row in solver.measurements] == [name]
