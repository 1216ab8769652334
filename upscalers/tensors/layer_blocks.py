"""Tensors outside the layers that hold one block for each layer, such as the embeddings per layer of Gemma 4."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from upscalers.architecture.inferred import InferredFamily
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.computed_tensor import ComputedTensor, read_tensor
from upscalers.plan.plan import Plan
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


@dataclass(frozen=True)
class LayerBlocks(Recipe):
    """Recipe that takes a block for each layer of the result, by index, from a tensor that has one for each layer of the base."""

    source: str
    dim: int
    num_blocks: int
    blocks: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return _chosen(read(self.source), self.dim, self.num_blocks, self.blocks)


@dataclass(frozen=True)
class _ChosenBlocks(ComputedTensor):
    """Some blocks of a stored tensor, as in `LayerBlocks`."""

    dim: int = 0
    num_blocks: int = 0
    blocks: tuple[int, ...] = ()

    def read(self) -> "torch.Tensor":
        return _chosen(read_tensor(self.in_file), self.dim, self.num_blocks, self.blocks)


def block_recipes(base: BaseCheckpoint, plan: Plan) -> dict[str, LayerBlocks]:
    """Return a recipe, by full name, for each tensor outside the layers with a block per layer, if the plan moves layers."""
    if plan.sources == list(range(base.num_layers)):
        return {}
    before, blocks = base.num_layers, tuple(plan.sources)
    return {
        name: LayerBlocks(_resized(base.tensors[name].shape, dim, before, len(blocks)), name, dim, before, blocks)
        for name, dim in _dims_of_blocks(base).items()
    }


def _dims_of_blocks(model: BaseCheckpoint) -> dict[str, int]:
    """Return the dimension along which a tensor outside the layers has one block per layer, by the tensor's full name."""
    assert isinstance(model.family, InferredFamily)
    blocks = model.family.blocks_by_layer(model.layout.outer)
    return {model.prefix + name.removeprefix("model."): dim for name, dim in blocks.items()}


def with_blocks_of_base(model: BaseCheckpoint, plan: Plan) -> BaseCheckpoint:
    """Return a model, made by a plan that keeps all layers of its base, with the base's blocks alone in tensors per layer."""
    if not isinstance(model.family, InferredFamily) or not plan.new_indices:
        return model
    blocks = tuple(plan.kept_indices[layer] for layer in range(plan.num_base_layers))
    chosen, before = {}, model.num_layers
    for name, dim in _dims_of_blocks(model).items():
        stored = model.tensors[name]
        shape = _resized(stored.shape, dim, before, len(blocks))
        chosen[name] = _ChosenBlocks(stored.dtype, shape, None, 0, stored, dim, before, blocks)
    return replace(model, tensors={**model.tensors, **chosen})


def _resized(shape: tuple[int, ...], dim: int, before: int, after: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // before * after, *shape[dim + 1 :])


def _chosen(tensor: "torch.Tensor", dim: int, num_blocks: int, blocks: Sequence[int]) -> "torch.Tensor":
    import torch

    parts = tensor.unflatten(dim, (num_blocks, -1))
    return parts.index_select(dim, torch.tensor(blocks)).flatten(dim, dim + 1)
