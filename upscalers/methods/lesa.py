"""LESA: new layers predicted from their neighbours by networks trained on the base's layers."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.sources.names import usable_device
from upscalers.architecture.layer_tensors import LayerTensor, Projection, projections_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, Surgery, register_method
from upscalers.methods.dense_block import FusionOptions, MatrixMethod
from upscalers.plan import New, Plan
from upscalers.tensors.recipes import Copy, Measurement, Recipe, Scratch, Solver, SolverTensor, stacked, tensor_seed

if TYPE_CHECKING:
    import torch

# As a share of the neighbours' norm: predictions below count as collapsed.
_COLLAPSED = 0.5
# Cosine to the neighbours' mean: predictions below count as unrelated; a neighbour itself has about 0.7.
_UNRELATED = 0.1
_HIDDEN_NORMS = frozenset({"attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm"})


@dataclass
class LesaOptions(FusionOptions):
    """Options of `lesa`: the training of predictors, and the source of tensors that are not predicted."""

    norm_init: Literal["layer0", "previous", "next", "mean"] = option(
        "layer0", "where the norms of a new layer come from: the base's first layer, as released, a neighbour, or both"
    )
    hidden_size: int = option(256, "of both hidden layers of a predictor")
    epochs: int = option(10, "passes over all rows of all layers")
    batch_size: int = option(64, "rows per step")
    learning_rate: float = option(1e-3, "of AdamW")
    weight_decay: float = option(0.01, "of AdamW")
    norm_weight: float = option(
        5e-4, "lambda, weight of the loss on the norm of predictions; with 0, unpredictable weights shrink"
    )
    device: str = option("cpu", "where predictors are trained: cpu, cuda, cuda:1")

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("hidden_size", self.hidden_size >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "a number above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("norm_weight", 0 <= self.norm_weight <= 1, "0 <= norm_weight <= 1"),
        ):
            if not is_right:
                raise RequestError(f"{name} is {getattr(self, name)}; expected {expected}.")


@register_method("lesa")
class Lesa(MatrixMethod):
    """New layers whose matrices a network predicts from their neighbours, in a shared basis."""

    summary = "new layers are predicted from the layers on both sides by networks trained on the base's layers"
    paper = Paper(
        key="lesa",
        title="LESA: Learnable LLM Layer Scaling-Up",
        authors="Yang, Yifei and Cao, Zouying and Ma, Xinbei and Yao, Yao and Qin, Libo and Chen, Zhi and Zhao, Hai",
        year=2025,
        reference="arXiv:2502.13794",
    )
    options_class = LesaOptions
    identity = False

    def check(self, base: BaseCheckpoint) -> None:
        super().check(base)
        if base.num_layers < 3:
            raise RequestError(
                f"the base has {base.num_layers} layers; lesa needs at least 3, to learn a layer from the two around it."
            )
        inserted = base.layout.memories.inserted
        if inserted:
            raise RequestError(
                f"base layer {min(inserted)} is a memory block; lesa learns from all layers, and expected each to have a "
                "feed-forward network. Upscale the base without memory first."
            )
        self.check_sources(base, range(base.num_layers), "a new layer")

    @property
    def kinds_remedy(self) -> str:
        return "lesa learns from all layers."

    def check_machine(self) -> None:
        usable_device(self.options.device, "float64")

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        surgery = super().surgery(base, plan, seed)
        layers = [*surgery.layers]
        filled = self.filled_roles(base)
        new = {index: layer for index, layer in enumerate(plan.layers) if isinstance(layer, New)}
        gaps = {index: (layer.sources[1], layer.sources[0]) for index, layer in new.items()}
        tensors = base.layout.backbone_layers[0]
        matrices = [
            each for each in projections_of(tensors) if each.role not in filled and each.name.endswith(".weight")
        ]
        solvers = [(each, MatrixPrediction(base, each, gaps, seed, self.options)) for each in matrices]
        for index in gaps:
            made = [(each, SolverTensor(each.shape, solver, str(index))) for each, solver in solvers]
            layers[index] = layers[index] | stacked(tensors, made)
        return replace(surgery, layers=layers)

    def tensor_recipe(self, base: BaseCheckpoint, layer: New, name: str, tensor: LayerTensor) -> Recipe:
        if tensor.role not in _HIDDEN_NORMS or self.options.norm_init == "mean":
            return super().tensor_recipe(base, layer, name, tensor)
        following, previous = layer.sources
        donor = {"layer0": 0, "previous": previous, "next": following}[self.options.norm_init]
        source = base.layer_names[donor][name]
        return Copy(base.tensors[source].shape, source)

    def review(self, measurements: Sequence[Measurement]) -> list[str]:
        concerns = []
        weak = [row for row in measurements if row["norm_ratio"] < _COLLAPSED]
        collapsed = _worst(weak, "norm_ratio")
        if collapsed:
            concerns.append(
                f"predictions collapsed: norms below {_COLLAPSED} of their neighbours' ({collapsed}); they have little effect "
                "at the start. More epochs may predict more; a larger norm_weight gives predictions a norm, not a direction."
            )
        guarded = {row["tensor"]: row["directions_left_out"] for row in measurements if row["directions_left_out"]}
        if guarded:
            listed = ", ".join(f"{role} {count}" for role, count in guarded.items())
            concerns.append(
                f"the base's layers do not span all directions: {listed} singular values are below the threshold and left out."
            )
        others = [row for row in measurements if row not in weak and row["cosine_to_mean"] < _UNRELATED]
        unrelated = _worst(others, "cosine_to_mean")
        if unrelated and not self.identity:
            concerns.append(
                f"predictions have a norm but no direction: their cosine to their neighbours' mean is below {_UNRELATED} "
                f"({unrelated}), so that the upscaled model begins far from the base. Lower norm_weight, down to 0, or pass "
                "identity=auto."
            )
        return concerns


def _worst(measurements: Sequence[Measurement], key: str) -> str:
    lowest: dict[str, float] = {}
    for row in measurements:
        lowest[row["tensor"]] = min(row[key], lowest.get(row["tensor"], row[key]))
    return ", ".join(f"{tensor} {value:.2g}" for tensor, value in lowest.items())


class MatrixPrediction(Solver):
    """Solver of a matrix [out, in] of all new layers; needs `8 max(5 out^2, 2 out^2 + 5 out in)` bytes."""

    def __init__(
        self,
        base: BaseCheckpoint,
        matrix: Projection,
        gaps: dict[int, tuple[int, int]],
        seed: int,
        options: LesaOptions,
    ):
        super().__init__(matrix.role)
        self._sources = [base.layer_names[layer][matrix.name] for layer in range(base.num_layers)]
        self._gaps = gaps
        self._options = options
        self._seed = tensor_seed(seed, f"lesa:{matrix.key}")
        self._out, self._in = matrix.shape
        self._rows = slice(matrix.first_row, matrix.first_row + self._out)
        self.scratch_bytes = 4 * len(self._sources) * self._out * self._in
        self.threads = 1  # so that the same seed gives the same bytes on any number of processors

    def solve(self, scratch: Scratch) -> "Iterator[tuple[str, torch.Tensor]]":
        import torch

        from upscalers.tensors.layer_predictor import RowFile, predict, shared_basis, train_predictor

        started = time.perf_counter()
        num_layers = len(self._sources)
        options = self._options
        steps = options.epochs * math.ceil(self._out * (num_layers - 2) / options.batch_size)
        done = scratch.progress.advance
        scratch.progress.stage(f"predicting {self.label}", 2 * num_layers + 1 + steps + len(self._gaps))

        def matrix_of(layer: int) -> torch.Tensor:
            return scratch.read(self._sources[layer])[self._rows].to(options.device, torch.float64)

        basis = shared_basis(num_layers, matrix_of, done)
        num_rows = len(basis.values)
        if not num_rows:
            raise RequestError(
                f"{self._sources[0]} and its counterparts are zero in every layer; lesa has nothing to learn from. Use another base."
            )
        with RowFile(scratch.folder / f"{self.label}.rows", num_rows, num_layers, self._in) as rows:
            for layer in range(num_layers):
                rows.write_layer(layer, basis.coordinates(matrix_of(layer)))
                done()
            generator = torch.Generator().manual_seed(self._seed)
            predictor = train_predictor(rows, generator, options, done)
            for index, (previous, following) in self._gaps.items():
                matrix = basis.matrix(predict(predictor, rows, previous, following, options.device))
                self._measure(index, matrix, matrix_of(previous), matrix_of(following), basis.num_left_out)
                yield str(index), matrix.cpu()
                done()
        for row in self.measurements:
            row["seconds"] = (time.perf_counter() - started) / len(self.measurements)

    def _measure(
        self, index: int, matrix: "torch.Tensor", previous: "torch.Tensor", following: "torch.Tensor", left_out: int
    ) -> None:
        """Add to the measurements how a predicted matrix relates to those of the layers around it."""
        import torch

        neighbours = (previous.norm() + following.norm()) / 2
        middle = previous.add_(following).div_(2)
        matrix = matrix.double()
        norms = (matrix.norm() * middle.norm()).item()
        self.measurements.append(
            {
                "layer": index,
                "tensor": self.label,
                "norm_ratio": (matrix.norm() / neighbours).item() if neighbours else 1.0,
                "cosine_to_mean": torch.dot(matrix.flatten(), middle.flatten()).item() / norms if norms else 0.0,
                "directions_left_out": left_out,
            }
        )
