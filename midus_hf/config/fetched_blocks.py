"""Parameters that texts fetch from a bank beside the checkpoint: how large the blocks are, and how each lies in one record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from midus_hf.config.declared_tensors import DeclaredTensor

BANKS_FOLDER = "memory_bank"
"""The folder beside a checkpoint that has a folder for the bank of each memory, by its name."""

BANK_DESCRIPTION = "bank.json"
"""The file of a bank that tells it from others."""

BANK_AUDIT = "audit.sqlite3"
"""The file of a bank that tells which documents trained its blocks; not every bank has it."""

TREE_FILES = ("tree.safetensors", "tree.json")
"""The files of a tree of topics, the one that vouches for the other last. A bank that was trained with a tree has a copy of it."""

TREE_COLUMN = "memory_tree"
"""The column of documents that have paths which holds the fingerprint of the tree by which the paths were found."""

_CHECKSUM_BYTES = 4
"""What each record of a bank has beside its block."""


def level_file(level: int) -> str:
    """What the file of a level is called, counted from 1."""
    return f"level-{level}.safetensors"


@dataclass(frozen=True)
class FetchedBlocks:
    """The blocks of a memory of which each text fetches one per level of a tree (hierarchical memories, section 2.1).

    Args:
        branching: k, children of each node of the tree; level l, counted from 1, has `k ** l` nodes.
        levels: For each level the tensors that one block has in one layer, by name; none where a level has no blocks.
        without_ids: What a text reads that names no blocks: nothing, or those of the generic memory. Default: nothing.
        joined_along: By name, the dimension of a tensor along which the blocks of several levels make one block that computes the
            same. Default: they do not.
    """

    branching: int
    levels: tuple[Mapping[str, DeclaredTensor], ...]
    without_ids: Literal["none", "generic"] = "none"
    joined_along: Mapping[str, int] = field(default_factory=dict)

    def nodes(self, level: int) -> int:
        """Nodes of a level, counted from 1, each of which has a block."""
        return self.branching**level

    def path(self, leaf: int) -> tuple[int, ...]:
        """The node of each level on the way to a leaf."""
        depth = len(self.levels)
        return tuple(leaf // self.branching ** (depth - level) for level in range(1, depth + 1))


@dataclass(frozen=True)
class BlockPlace:
    """Where a tensor lies in the record of a block.

    Args:
        layer: Of the model.
        name: Of the tensor.
        start: Elements in front of it.
        tensor: Its declaration.
    """

    layer: int
    name: str
    start: int
    tensor: DeclaredTensor

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.tensor.shape)


@dataclass(frozen=True)
class BankLayout:
    """How the bank of a memory lies in files: a record per block, which has the tensors of all layers.

    Beside the blocks of the tree each level has one more, the last, which belongs to the generic memory: what texts read that fetch
    none of their own (section 4).

    Args:
        memory_type: Of the memory.
        layers: That have it, ascending.
        blocks: Of each layer.
        base: SHA-256 of the weights that the model was upscaled from, as its config has it. Default: nobody knows it.
    """

    memory_type: str
    layers: tuple[int, ...]
    blocks: FetchedBlocks
    base: str | None = None
    levels: list[int] = field(init=False, repr=False, compare=False)
    """The levels that have blocks, counted from 1."""
    records: dict[int, tuple[BlockPlace, ...]] = field(init=False, repr=False, compare=False)
    """Where tensors lie in a record, for each level that has blocks: layer by layer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", [level for level, tensors in enumerate(self.blocks.levels, 1) if tensors])
        object.__setattr__(self, "records", {level: self._record(level) for level in self.levels})

    @property
    def num_levels(self) -> int:
        """p, levels of the tree, those without blocks included."""
        return len(self.blocks.levels)

    def record_numel(self, level: int) -> int:
        """s_l, elements of the record of a block."""
        return sum(place.numel for place in self.records[level])

    def num_records(self, level: int) -> int:
        """Records of a level: one per node, and that of the generic memory, the last."""
        return self.blocks.nodes(level) + 1

    def file_bytes(self, level: int, item_bytes: int) -> int:
        """Bytes of a level's file once all of its blocks were written, without the file's header.

        Args:
            level: Counted from 1.
            item_bytes: Of an element of a block.
        """
        return self.num_records(level) * (_CHECKSUM_BYTES + self.record_numel(level) * item_bytes)

    @property
    def fetched(self) -> int:
        """Parameters that a text fetches, `|R(x; W)|`."""
        return sum(map(self.record_numel, self.levels))

    @property
    def bank(self) -> int:
        """Parameters of all blocks, `|W|`, the generic memory not included."""
        return sum(self.record_numel(level) * self.blocks.nodes(level) for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, to tell the bank of one model from that of another."""
        return {
            "type": self.memory_type,
            "layers": list(self.layers),
            "base": self.base,
            "branching": self.blocks.branching,
            "levels": [
                {name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in self.blocks.levels
            ],
        }

    def difference(self, found: Any) -> str | None:
        """Return the first thing in which the plain data of another layout differ from this layout's; None if they fit.

        A base that one of the two does not know is not compared.

        Args:
            found: What `to_dict` gave for the other layout.
        """
        if not isinstance(found, dict):
            return f"its layout is {found!r}"
        for key, value in self.to_dict().items():
            other = found.get(key)
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
