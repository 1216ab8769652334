"""Tensors outside the layers that hold one block for each layer, such as the embeddings per layer of Gemma 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upscalers.architecture.layer_tensors import Config
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
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
        import torch

        parts = read(self.source).unflatten(self.dim, (self.num_blocks, -1))
        return parts.index_select(self.dim, torch.tensor(self.blocks)).flatten(self.dim, self.dim + 1)


def block_recipes(model: BaseCheckpoint, layers: Sequence[int], config: Config) -> dict[str, LayerBlocks]:
    """Return a recipe for each tensor outside the layers that has a block per layer, by full name.

    `layers` has the layer of the model whose block each layer of the result gets, and `config` is the result's.
    """
    before, after = model.num_layers, len(layers)
    if list(layers) == list(range(before)):
        return {}
    recipes, outer = {}, layout_of(config).outer
    for name, shape in model.layout.outer.items():
        sizes = zip(shape, outer.get(name, shape), strict=True)
        dims = [dim for dim, (size, wanted) in enumerate(sizes) if size != wanted and size * after == wanted * before]
        for dim in dims:
            resized = (*shape[:dim], shape[dim] // before * after, *shape[dim + 1 :])
            full = model.prefix + name.removeprefix("model.")
            recipes[full] = LayerBlocks(resized, full, dim, before, tuple(layers))
    return recipes
