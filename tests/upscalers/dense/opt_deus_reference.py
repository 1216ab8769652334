"""OpT-DeUS written out plainly, matrix by matrix, to compare the method with."""

from dataclasses import dataclass

import torch

from tests.upscalers.solvers import sinkhorn_loop

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


@dataclass
class Settings:
    """The options, by their names."""

    solver: str = "sinkhorn"
    plan_scale: str = "barycentric"
    regularization: float = 0.06
    mlp_t_in: str = "o_proj"
    identity: str = "auto"


def block(family: str, first: Tensors, second: Tensors, settings: Settings) -> Tensors:
    """The new block between two layers, float64, by the tensors' names within it."""
    first, second = ({name: tensor.double() for name, tensor in layer.items()} for layer in (first, second))
    raw = settings.plan_scale == "raw"
    made = {name: (first[name] + second[name]) / 2 for name in first}

    def plan(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if settings.solver == "hungarian":
            exact = _exact(source, target)
            return exact if raw else exact * len(target)
        transport = sinkhorn_loop.plan(source, target, settings.regularization)
        return transport if raw else sinkhorn_loop.barycentric(transport)

    def fuse(name: str, source: torch.Tensor) -> torch.Tensor:
        """Fuse a matrix and its bias, and return the plan."""
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


def _exact(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The permutation of least total distance as a plan of mass one, by linear programming."""
    from scipy.optimize import linprog
    from scipy.sparse import eye, kron, vstack

    n = len(source)
    cost = (source[:, None] - target[None]).square().sum(-1).sqrt()
    ones, identity = torch.ones(1, n).numpy(), eye(n)
    marginals = vstack([kron(identity, ones), kron(ones, identity)])
    solution = linprog(cost.flatten().numpy(), A_eq=marginals, b_eq=torch.full((2 * n,), 1 / n).numpy())
    assert solution.status == 0
    return torch.from_numpy(solution.x).view(n, n).mul(n).round().div(n)
