"""Sharing of value tables between the layers of a memory (UltraMemV2, appendix E.5)."""

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(noring|ring|block):([1-9]\d*)")

EXPECTED = "none, all, noring:G, ring:G or block:G, such as ring:4"


@dataclass(frozen=True)
class TableSharing:
    """Rule by which layers share value tables. Each layer brings one table, unless the kind is `all`.

    Args:
        kind: `none`: a layer reads its own table. `all`: all layers read one table. `noring`: a layer reads its own
            table and the tables of its nearest neighbours; at the ends of the model more of them are on one side.
            `ring`: the same, but the first layer counts as the neighbour of the last. `block`: every G neighbours read
            the G tables of all of them.
        group: G, the number of tables that each layer reads. Default: 1.
    """

    kind: str
    group: int = 1

    @classmethod
    def read(cls, share: str) -> "TableSharing":
        """Parse the option `share`, such as `ring:4`.

        Raises:
            ValueError: If the option has another form.
        """
        if share in ("none", "all"):
            return cls(share)
        match = _PATTERN.fullmatch(share)
        if match is None:
            raise ValueError(f"share is {share!r}; expected {EXPECTED}.")
        return cls(match[1], int(match[2]))

    def blocks(self, num_layers: int) -> list[range]:
        """Return the blocks of layers that read parts of one stored table.

        Layers are numbered from 0 among the layers that have the memory.

        Raises:
            ValueError: If G is larger than the number of layers, or if blocks of G layers do not divide the layers
                evenly.
        """
        if self.kind == "none":
            return []
        if self.group > num_layers:
            raise ValueError(
                f"share is '{self.kind}:{self.group}', but {num_layers} layers have the memory; expected a group of at "
                "most that many tables."
            )
        if self.kind != "block":
            return [range(num_layers)]
        if num_layers % self.group:
            raise ValueError(
                f"share is 'block:{self.group}', which does not divide the {num_layers} layers that have the memory; expected a "
                "divisor."
            )
        return [range(first, first + self.group) for first in range(0, num_layers, self.group)]

    def stored(self, num_layers: int) -> int:
        """Return the number of tables that are stored as one table for a block of `num_layers` layers."""
        return 1 if self.kind == "all" else num_layers

    def first(self, layer: int, stored: int) -> int:
        """Return the number of the first table that a layer reads, among the tables stored as one.

        The layer also reads the next G - 1 tables. After the last table comes the first again.

        Args:
            layer: Number of the layer, from 0 among the layers that have the memory.
            stored: Number of tables stored as one.
        """
        before = layer - (self.group - 1) // 2
        if self.kind == "noring":
            return min(max(before, 0), stored - self.group)
        return before % stored if self.kind == "ring" else 0
