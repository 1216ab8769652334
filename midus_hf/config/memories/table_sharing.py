"""Which value tables the layers of a memory read (UltraMemV2, appendix E.5)."""

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(noring|ring|block):([1-9]\d*)")

EXPECTED = "none, all, noring:G, ring:G or block:G, such as ring:4"


@dataclass(frozen=True)
class TableSharing:
    """How the layers of a memory share value tables, of which each layer brings one.

    Args:
        kind: `none`: a layer reads its own. `all`: there is one for all. `noring`: a layer reads its own and those of its nearest
            neighbours, fewer on one side at the ends. `ring`: the same, where the first layer follows the last. `block`: G
            neighbours read all their tables, and no others.
        group: G, tables that each layer reads. Default: 1.
    """

    kind: str
    group: int = 1

    @classmethod
    def read(cls, share: str) -> "TableSharing":
        """The sharing that an option names.

        Raises:
            ValueError: If it names none.
        """
        if share in ("none", "all"):
            return cls(share)
        match = _PATTERN.fullmatch(share)
        if match is None:
            raise ValueError(f"share is {share!r}; expected {EXPECTED}.")
        return cls(match[1], int(match[2]))

    def blocks(self, num_layers: int) -> list[range]:
        """The layers, by their number among those that have the memory, that read parts of one stored table.

        Raises:
            ValueError: If a group has more layers than there are, or blocks of it do not fill them.
        """
        if self.kind == "none":
            return []
        if self.group > num_layers:
            raise ValueError(
                f"share is '{self.kind}:{self.group}', but {num_layers} layers have the memory; expected a group of at most as many."
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
        """Tables that are stored as one where `num_layers` read parts of it."""
        return 1 if self.kind == "all" else num_layers

    def first(self, layer: int, stored: int) -> int:
        """The first of the tables that a layer reads, among those stored with its own; the others follow, the first behind the last.

        Args:
            layer: Its number among the layers that have the memory.
            stored: Tables that are stored as one.
        """
        before = layer - (self.group - 1) // 2
        if self.kind == "noring":
            return min(max(before, 0), stored - self.group)
        return before % stored if self.kind == "ring" else 0
