"""Tensors outside the layers that hold one block for each layer, such as the embeddings per layer of Gemma 4."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from midus_hf.anatomy.record import UpscaleRecord
from upscalers.architecture.layer_tensors import Config, Layout, Shape
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.computed_tensor import ComputedTensor, read_tensor
from upscalers.plan.plan import Plan
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


@dataclass(frozen=True)
class LayerBlocks(Recipe):
    """Recipe that takes a block for each layer of the result, by index, from a tensor that has one for each layer of the base.

    The `num_blocks` blocks of the `source` are along the dimension `dim`.
    """

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


def block_recipes(base: BaseCheckpoint, plan: Plan, config: Config) -> dict[str, LayerBlocks]:
    """Return a recipe for each tensor outside the layers that has a block per layer, by full name; `config` is the result's.

    A layer of the result gets the block of the base layer whose attention it takes.
    """
    if plan.sources == list(range(base.num_layers)):
        return {}
    return {
        name: LayerBlocks(shape, name, dim, base.num_layers, tuple(plan.sources))
        for name, dim, shape in _with_blocks(base, layout_of(config))
    }


def _with_blocks(model: BaseCheckpoint, other: Layout) -> Iterator[tuple[str, int, Shape]]:
    """Yield each tensor outside the layers that has one block per layer, along which dimension, and its shape in a deeper model."""
    before, after = model.num_layers, len(other.layers)
    for name, shape in model.layout.outer.items():
        sizes = zip(shape, other.outer.get(name, shape), strict=True)
        dims = [dim for dim, (size, wanted) in enumerate(sizes) if size != wanted and size * after == wanted * before]
        for dim in dims:
            resized = (*shape[:dim], shape[dim] // before * after, *shape[dim + 1 :])
            yield model.prefix + name.removeprefix("model."), dim, resized


def with_blocks_of_base(model: BaseCheckpoint, plan: Plan, upscaled: UpscaleRecord) -> BaseCheckpoint:
    """Return a model, made by a plan that keeps all layers of its base, with only the base's blocks in tensors per layer."""
    if not plan.new_indices:
        return model
    blocks = tuple(plan.kept_indices[layer] for layer in range(plan.num_base_layers))
    chosen = {
        name: _ChosenBlocks(
            dtype=stored.dtype,
            shape=shape,
            start=0,
            weight=stored,
            dim=dim,
            num_blocks=model.num_layers,
            blocks=blocks,
        )
        for name, dim, shape in _with_blocks(model, layout_of(dict(upscaled.base_config)))
        for stored in (model.tensors[name],)
    }
    return replace(model, tensors={**model.tensors, **chosen})


def _chosen(tensor: "torch.Tensor", dim: int, num_blocks: int, blocks: Sequence[int]) -> "torch.Tensor":
    import torch

    parts = tensor.unflatten(dim, (num_blocks, -1))
    return parts.index_select(dim, torch.tensor(blocks)).flatten(dim, dim + 1)
