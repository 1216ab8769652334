"""OpT-DeUS: neighbours fused, with neurons matched by optimal transport; and the baseline, their mean."""

import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from midus_hf.config.errors import RequestError, install_extra
from midus_hf.config.options import option
from midus_hf.sources.names import usable_device
from upscalers.architecture.layer_tensors import LayerTensor, Projection, projections_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.dense_block import IDENTITY_HELP, FusionMethod, FusionOptions, IdentityInit, MatrixMethod
from upscalers.plan import New
from upscalers.tensors.recipes import Measurement, Recipe, Scratch, Solver, SolverTensor, stacked

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.transport import Transport

_WEAK = 0.3
OPT_DEUS = Paper(
    key="optdeus",
    title="Progressive Depth Up-scaling via Optimal Transport",
    authors="Cao, Mingzi and Wang, Xi and Aletras, Nikolaos",
    year=2025,
    reference="arXiv:2508.08011",
)


@dataclass
class OptDeusOptions(FusionOptions):
    """Options of `opt-deus`: how neurons are matched and fused."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "release": {"plan_scale": "raw", "regularization": 0.06, "mlp_t_in": "o_proj", "solver": "sinkhorn"}
    }

    identity: IdentityInit = option("auto", IDENTITY_HELP)
    solver: Literal["sinkhorn", "hungarian"] = option(
        "sinkhorn", "entropic transport, or the exact assignment: a permutation, slow beyond a few thousand rows"
    )
    plan_scale: Literal["barycentric", "raw"] = option(
        "barycentric", "matched rows are means of rows, as in the paper, or, as in the release, shrink by their number"
    )
    regularization: float = option(0.06, "of the entropy, in units of the distance between rows")
    tolerance: float = option(1e-4, "largest L1 violation of the plan's marginals at which Sinkhorn stops")
    max_iterations: int = option(10000, "after which Sinkhorn stops without converging, with a warning")
    mlp_t_in: Literal["o_proj", "residual_mean"] = option(
        "o_proj",
        "what maps inputs of gate and up: the output projection's plan, as released, or its mean with the identity",
    )
    precision: Literal["float64", "float32"] = option("float64", "what transport is computed in")
    device: str = option("cpu", "where it is computed: cpu, cuda, cuda:1")

    def __post_init__(self) -> None:
        for name in ("regularization", "tolerance", "max_iterations"):
            if not 0 < getattr(self, name) < float("inf"):
                raise RequestError(f"{name} is {getattr(self, name)}; expected a number above 0.")


@register_method("avg-deus")
class AvgDeus(FusionMethod):
    """New layers that are the mean of their neighbours (the averaging baseline of OpT-DeUS)."""

    summary = "new layers are the mean of the layers on both sides"
    paper = OPT_DEUS
    options_class = FusionOptions
    identity = False


@register_method("opt-deus")
class OptDeus(MatrixMethod):
    """New layers of matrices `(T^T W_previous + W_next) / 2`, T being the transport plan between rows."""

    summary = "new layers fuse the layers on both sides, neurons matched by optimal transport"
    paper = OPT_DEUS
    options_class = OptDeusOptions
    identity = True

    def check_machine(self) -> None:
        module, package = {"sinkhorn": ("ot", "POT"), "hungarian": ("scipy", "scipy")}[self.options.solver]
        if importlib.util.find_spec(module) is None:
            raise RequestError(
                f"solver {self.options.solver} needs {package}, which is not installed; {install_extra('ot')}."
            )
        usable_device(self.options.device, self.options.precision)

    def new_layer_recipes(self, base: BaseCheckpoint, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        solver = BlockFusion(base, layer, index, self.filled_roles(base), self.options)
        recipes = super().new_layer_recipes(base, layer, index, seed)
        return recipes | solver.recipes()

    def review(self, measurements: Sequence[Measurement]) -> list[str]:
        concerns = []
        late = [row for row in measurements if not row["residual"] <= self.options.tolerance]
        if late:
            worst = max(late, key=lambda row: row["residual"])
            concerns.append(
                f"Sinkhorn did not converge for {', '.join(dict.fromkeys(row['tensor'] for row in late))} of new layers "
                f"{', '.join(dict.fromkeys(str(row['layer']) for row in late))}: residual up to {worst['residual']:.2g} after "
                f"{worst['iterations']} iterations, expected at most {self.options.tolerance:g}. Raise max_iterations, tolerance or "
                "regularization."
            )
        ordered = sorted(measurements, key=lambda row: -row["norm_ratio"])
        weak = {row["tensor"]: row for row in ordered if row["norm_ratio"] < _WEAK}  # the weakest layer per role
        if weak and self.options.plan_scale == "barycentric":
            listed = ", ".join(f"{role} {row['norm_ratio']:.2g}" for role, row in weak.items())
            concerns.append(
                f"matched rows keep little of their norm ({listed}): they have no counterparts, so that the result is close to "
                "half the next layer's. solver=hungarian keeps the norm."
            )
        return concerns


class BlockFusion(Solver):
    """Solver that fuses the layers around a new block; needs `b (6 n^2 + 4 n D)` bytes for n rows."""

    def __init__(self, base: BaseCheckpoint, layer: New, index: int, filled: frozenset[str], options: OptDeusOptions):
        super().__init__(f"layer {index}")
        self._index = index
        self._filled = filled
        self._options = options
        self._next, self._previous = (base.layer_names[source] for source in layer.sources)
        self._tensors = base.layout.backbone_layers[layer.sources[0]]
        self._head_dim = base.layout.sizes.head_dim
        projections = projections_of(self._tensors)
        self._weights = {each.role: each for each in projections if each.name.endswith(".weight")}
        self._biases = {
            each.role: each for each in projections if each.name.endswith(".bias") and each.role not in filled
        }
        self._norms = {
            tensor.role: name for name, tensor in self._tensors.items() if self._is_made_norm(base, name, tensor)
        }

    def recipes(self) -> dict[str, Recipe]:
        made = [each for each in (*self._weights.values(), *self._biases.values()) if each.role not in self._filled]
        norms: dict[str, Recipe] = {
            name: SolverTensor(self._tensors[name].shape, self, name) for name in self._norms.values()
        }
        return norms | stacked(self._tensors, [(each, SolverTensor(each.shape, self, each.key)) for each in made])

    def solve(self, scratch: Scratch) -> "Iterator[tuple[str, torch.Tensor]]":
        num_fused = len(self._weights)
        if "down" in self._filled:
            num_fused -= 1
        scratch.progress.stage(f"fusing {self.label}", num_fused + 1)
        for role in ("query", "key", "value"):
            previous, following = self._pair(scratch, role)
            plan = self._transport(role, previous, following, scratch, previous)
            yield from self._fused(role, plan, scratch, previous, following)
            norm = self._norms.get(f"{role}_norm")
            if norm is not None:
                one, other = self._read(scratch, norm)
                yield norm, ((self._barycentric(plan, one) + other) / 2).cpu()
            del plan  # free the plan before the next one is made
        previous, following = self._pair(scratch, "output_projection")
        residual = self._transport("output_projection", previous, following, scratch, previous)
        if "output_projection" not in self._filled:
            yield from self._fused("output_projection", residual, scratch, previous, following)
        yield from self._mlp_norm(residual, scratch)
        for role in ("gate", "up", "down"):
            if role not in self._weights or role in self._filled:
                continue
            previous, following = self._pair(scratch, role)
            carried = previous
            if role != "down":
                carried = residual.columns(previous)
                if self._options.mlp_t_in == "residual_mean":
                    carried = (carried + previous) / 2
            plan = self._transport(role, carried, following, scratch, previous)
            yield from self._fused(role, plan, scratch, carried, following)
            del plan

    def _pair(self, scratch: Scratch, role: str) -> "tuple[torch.Tensor, torch.Tensor]":
        return self._read(scratch, self._weights[role].name, self._weights[role])

    def _read(
        self, scratch: Scratch, name: str, projection: Projection | None = None
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        dtype = getattr(torch, self._options.precision)
        first = projection.first_row if projection else 0
        rows = slice(first, first + projection.shape[0] if projection else None)
        previous, following = (
            scratch.read(names[name])[rows].to(self._options.device, dtype) for names in (self._previous, self._next)
        )
        return previous, following

    def _transport(
        self, role: str, source: "torch.Tensor", target: "torch.Tensor", scratch: Scratch, original: "torch.Tensor"
    ) -> "Transport":
        """Compute and measure the plan between rows; `original` is the source before its inputs were mapped."""
        from upscalers.tensors.transport import assignment, sinkhorn

        options = self._options
        started = time.perf_counter()
        if options.solver == "hungarian":
            plan = assignment(source, target, options.plan_scale)
        else:
            limits = (options.regularization, options.tolerance, options.max_iterations)
            plan = sinkhorn(source, target, *limits, options.plan_scale)
        seconds = time.perf_counter() - started
        norm = original.norm().item()
        ratio = plan.rows(source).norm().item() / norm if norm else 1.0
        measured = {name: getattr(plan, name) for name in ("effective_sources", "iterations", "residual")}
        row = {"layer": self._index, "tensor": role, "norm_ratio": ratio, **measured, "seconds": seconds}
        self.measurements.append(row)
        scratch.progress.advance()
        return plan

    def _fused(
        self, role: str, plan: "Transport", scratch: Scratch, source: "torch.Tensor", following: "torch.Tensor"
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        yield self._weights[role].key, ((plan.rows(source) + following) / 2).cpu()
        bias = self._biases.get(role)
        if bias is not None:
            one, other = self._read(scratch, bias.name, bias)
            carried = one if self._options.plan_scale == "raw" else plan.rows(one)
            yield bias.key, ((carried + other) / 2).cpu()

    def _mlp_norm(self, residual: "Transport", scratch: Scratch) -> "Iterator[tuple[str, torch.Tensor]]":
        # The norm reads the residual stream, so the previous layer's gain is half mapped and half unchanged.
        name = self._norms.get("mlp_norm")
        if name is not None:
            offset = self._tensors[name].offset or 0.0
            previous, following = (weight + offset for weight in self._read(scratch, name))
            mapped = (residual.columns(previous) + previous) / 2
            yield name, ((mapped + following) / 2 - offset).cpu()
        scratch.progress.advance()

    @staticmethod
    def _barycentric(plan: "Transport", values: "torch.Tensor") -> "torch.Tensor":
        import torch

        return plan.rows(values) / plan.rows(torch.ones_like(values))

    def _is_made_norm(self, base: BaseCheckpoint, name: str, tensor: LayerTensor) -> bool:
        """Return whether a norm's weight is mapped: the feed-forward network's, or one over all heads."""
        if not name.endswith(".weight") or tensor.offset is None or tensor.role in self._filled:
            return False
        if tensor.role not in ("query_norm", "key_norm"):
            return tensor.role == "mlp_norm"
        whole = base.family.norms_all_heads or tensor.shape[0] != self._head_dim
        return whole and tensor.shape[0] == self._weights[tensor.role.removesuffix("_norm")].shape[0]
