"""Where the blocks of a bank wait to be fetched: on the model's device, in memory, or on the disk alone."""

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import torch

from midus_hf.config.fetched_blocks import BankLayout

Tier = Literal["device", "memory", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
BlockKey = tuple[int, int]
"""Level, counted from 1, and index of a block."""

_ROOM = 2**30


@dataclass(frozen=True)
class BankTiers:
    """Where the blocks of each level wait that were fetched, and how much room they have there.

    `device`: on the device of the model, in its dtype, so that fetching them again moves nothing. `memory`: in memory, as they are
    stored. `disk`: nowhere; the file is mapped whenever they are fetched, and the system's page cache may have it. Within `device`
    and `memory` those that were fetched longest ago give way.

    Args:
        levels: Tiers by level, counted from 1. Default: `memory` for every level.
        device_bytes: Room for levels of `device`. Default: 1 GB.
        memory_bytes: Room for levels of `memory`. Default: 1 GB.
        ahead_bytes: Room for what was read ahead and nobody has fetched yet. Default: 1 GB.

    Raises:
        ValueError: If a level, a tier or a number of bytes is none.
    """

    levels: Mapping[int, Tier] = field(default_factory=dict)
    device_bytes: int = _ROOM
    memory_bytes: int = _ROOM
    ahead_bytes: int = _ROOM

    def __post_init__(self) -> None:
        if not isinstance(self.levels, Mapping):
            raise ValueError(f"levels of tiers is {self.levels!r}; expected tiers by level, such as {{1: 'device'}}.")
        for level, tier in self.levels.items():
            if type(level) is not int or level < 1:
                raise ValueError(f"tiers names level {level!r}; expected a number from 1, the level of a tree.")
            if tier not in TIERS:
                raise ValueError(f"the tier of level {level} is {tier!r}; expected one of: {', '.join(TIERS)}.")
        for name in ("device_bytes", "memory_bytes", "ahead_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} of tiers is {value!r}; expected a number of bytes, 0 or more.")

    @classmethod
    def of(cls, given: "BankTiers | Mapping[str, Any] | None") -> "BankTiers":
        """Tiers, or what a mapping says of them.

        Raises:
            ValueError: If the mapping has a key that is none of theirs.
        """
        if given is None or isinstance(given, BankTiers):
            return given or cls()
        names = [one.name for one in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(f"tiers is {given!r}; expected BankTiers or a mapping with the keys {', '.join(names)}.")
        for name in given:
            if name not in names:
                raise ValueError(f"tiers has {name!r}; expected keys among {', '.join(names)}.")
        return cls(**given)

    def check(self, layout: BankLayout) -> None:
        """Compare them with the tree of a bank.

        Raises:
            ValueError: If they name a level that the tree has not.
        """
        for level in self.levels:
            if level > layout.num_levels:
                raise ValueError(
                    f"tiers names level {level}; expected 1 to {layout.num_levels}, the levels of the tree."
                )

    def of_level(self, level: int) -> Tier:
        """The tier of a level."""
        return self.levels.get(level, "memory")


@dataclass
class TierStatistics:
    """What fetches found in a tier since the bank was opened.

    Args:
        hits: Blocks that were there.
        misses: Blocks that had to be read; on `disk` each one has.
        ahead: Of these, blocks whose reading was begun ahead of the fetch.
        read_bytes: Bytes of the misses.
        held_bytes: Bytes that the tier has now.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    read_bytes: int = 0
    held_bytes: int = 0

    def plus(self, other: "TierStatistics") -> "TierStatistics":
        """Of two banks together."""
        return TierStatistics(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, earlier: "TierStatistics") -> "TierStatistics":
        """What came after an earlier look; `held_bytes` as it is now."""
        counts = {one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)}
        return TierStatistics(**{**counts, "held_bytes": self.held_bytes})


class KeptBlock(NamedTuple):
    """A block that waits in a tier.

    Args:
        record: `[numel]`.
        checksum: That the file had for it when it was read.
    """

    record: torch.Tensor
    checksum: int


class KeptBlocks:
    """Blocks that were fetched last, as many as there is room for; one that has no room at all is not kept.

    Args:
        room: In bytes.
    """

    def __init__(self, room: int):
        self.room, self.held_bytes = room, 0
        self._blocks: collections.OrderedDict[BlockKey, KeptBlock] = collections.OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> KeptBlock | None:
        """The block, which is now the one that was fetched last; None if it is not here."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: KeptBlock) -> None:
        """Keep a block; those that were fetched longest ago give way."""
        self.drop(key)
        if block.record.nbytes > self.room:
            return
        self._blocks[key] = block
        self.held_bytes += block.record.nbytes
        while self.held_bytes > self.room:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: BlockKey) -> None:
        """Forget a block, if it is here."""
        dropped = self._blocks.pop(key, None)
        self.held_bytes -= 0 if dropped is None else dropped.record.nbytes

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self.held_bytes = 0
