"""Banks of a checkpoint, from which texts fetch blocks of parameters: the sizes of blocks and their layout in records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from midus_hf.config.declared_tensors import DeclaredTensor

# Size of the mark that a bank stores for each block.
_MARK_BYTES = 1


def level_file(level: int) -> str:
    """Return the file name of a level, counted from 1."""
    return f"level-{level}.safetensors"


@dataclass(frozen=True)
class FetchedBlocks:
    """Blocks of a memory. A text fetches one block per level of a tree (hierarchical memories, section 2.1).

    Args:
        branching: k, children of each node of the tree; level l, counted from 1, has `k ** l` nodes.
        levels: For each level, the tensors by name that one block has in one layer; empty for a level without blocks.
        without_ids: Blocks for a text that comes without block ids: none, or the blocks of the generic memory. Default:
            none.
        roots: Nodes of the first level, more than `branching` in a tree that has grown; level l then has
            `roots * k ** (l - 1)` nodes. Default: None, for `branching`.
    """

    branching: int
    levels: tuple[Mapping[str, DeclaredTensor], ...]
    without_ids: Literal["none", "generic"] = "none"
    roots: int | None = None

    def nodes(self, level: int) -> int:
        """Return the number of nodes of a level, counted from 1. Each node has a block, unless the level has no blocks."""
        return (self.roots or self.branching) * self.branching ** (level - 1)

    def path(self, leaf: int) -> tuple[int, ...]:
        """Return the nodes on the way to a leaf: one per level, the leaf itself last."""
        depth = len(self.levels)
        return tuple(leaf // self.branching ** (depth - level) for level in range(1, depth + 1))


@dataclass(frozen=True)
class BlockPlace:
    """Position of a tensor in the record of a block.

    Args:
        layer: Index of the layer in the model.
        name: Name of the tensor within the block.
        start: Number of elements before the tensor.
        tensor: Declaration of the tensor.
    """

    layer: int
    name: str
    start: int
    tensor: DeclaredTensor

    @property
    def numel(self) -> int:
        """Number of elements in the tensor."""
        return math.prod(self.tensor.shape)


@dataclass(frozen=True)
class BankLayout:
    """Layout of a memory's bank in files: one record per block, with the tensors of all layers.

    The first record of each level is one more block, of the generic memory. A text without block ids can read the generic
    memory (section 4).

    Args:
        memory_type: Type of the memory, as in the config.
        layers: Indices of the layers that have the memory, ascending.
        blocks: Blocks that each layer has.
        base: SHA-256 of the weights that the model was upscaled from, from its config. Default: None, unknown.
    """

    memory_type: str
    layers: tuple[int, ...]
    blocks: FetchedBlocks
    base: str | None = None
    # The levels that have blocks, counted from 1.
    levels: list[int] = field(init=False, repr=False, compare=False)
    # Positions of the tensors in a record, layer by layer, for each level that has blocks.
    records: dict[int, tuple[BlockPlace, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", [level for level, tensors in enumerate(self.blocks.levels, 1) if tensors])
        object.__setattr__(self, "records", {level: self._record(level) for level in self.levels})

    def with_roots(self, roots: int | None) -> "BankLayout":
        """Return the layout for a tree that has grown to `roots` nodes of the first level; None for one that has not."""
        return replace(self, blocks=replace(self.blocks, roots=roots))

    @property
    def num_levels(self) -> int:
        """p, the number of levels of the tree, including levels without blocks."""
        return len(self.blocks.levels)

    def record_numel(self, level: int) -> int:
        """Return s_l, the number of elements in the record of a block."""
        return sum(block_place.numel for block_place in self.records[level])

    def num_records(self, level: int) -> int:
        """Return the number of records of a level: one per node, and the record of the generic memory."""
        return self.blocks.nodes(level) + 1

    def file_bytes(self, level: int, item_bytes: int) -> int:
        """Return the bytes of a level's file once all blocks are written, without the file's header.

        Args:
            level: Level of the tree, counted from 1.
            item_bytes: Bytes per element of a block.
        """
        return self.num_records(level) * (_MARK_BYTES + self.record_numel(level) * item_bytes)

    @property
    def fetched(self) -> int:
        """Number of parameters that a text fetches, `|R(x; W)|`."""
        return sum(map(self.record_numel, self.levels))

    @property
    def bank(self) -> int:
        """Number of parameters in all blocks, `|W|`, without the generic memory."""
        return sum(self.record_numel(level) * self.blocks.nodes(level) for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain data, which distinguishes the banks of different models."""
        return {
            "type": self.memory_type,
            "layers": list(self.layers),
            "base": self.base,
            "branching": self.blocks.branching,
            "levels": [
                {name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in self.blocks.levels
            ],
        }

    def difference(self, data: Any) -> str | None:
        """Return the first difference between another layout and this one, in words; None if they fit.

        Bases are compared only if both layouts know theirs.

        Args:
            data: The other layout as plain data, from `to_dict`.
        """
        if not isinstance(data, dict):
            return f"its layout is {data!r}"
        for key, value in self.to_dict().items():
            other = data.get(key)
            if other == value or (key == "base" and None in (other, value)):
                continue
            if key == "base":
                return (
                    f"its base, the weights that its model was upscaled from, has the digest {str(other)[:16]}...; expected "
                    f"{str(value)[:16]}..."
                )
            return f"its {key} is {other!r}; expected {value!r}"
        return None

    def _record(self, level: int) -> tuple[BlockPlace, ...]:
        places, start = [], 0
        for layer in self.layers:
            for name, tensor in self.blocks.levels[level - 1].items():
                places.append(BlockPlace(layer, name, start, tensor))
                start += places[-1].numel
        return tuple(places)
