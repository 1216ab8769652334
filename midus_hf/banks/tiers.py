"""Tiers of a bank: blocks are kept on the model's device, in memory, or on the disk only."""

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import torch

from midus_hf.config.fetched_blocks import BankLayout

Tier = Literal["device", "memory", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
# Level of a block, counted from 1, and its index.
BlockKey = tuple[int, int]

_ROOM = 2**30


@dataclass(frozen=True)
class BankTiers:
    """Tier that keeps the fetched blocks of each level, and the room of each tier.

    `device` keeps blocks on the model's device, in the model's dtype, so that another fetch moves nothing. `memory`
    keeps blocks in memory as they are stored. `disk` keeps nothing: each fetch maps the file, which the system's page
    cache may hold. In `device` and `memory`, the blocks that were fetched longest ago are dropped when there is no
    room.

    Args:
        levels: Tier of each level, by level counted from 1. Default: `memory` for every level.
        device_bytes: Room for blocks in `device`, in bytes. Default: 1 GB.
        memory_bytes: Room for blocks in `memory`, in bytes. Default: 1 GB.
        ahead_bytes: Room for blocks that were read ahead and not fetched yet, in bytes. Default: 1 GB.

    Raises:
        ValueError: If a level, a tier or a number of bytes is not valid.
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
    def of(cls, tiers: "BankTiers | Mapping[str, Any] | None") -> "BankTiers":
        """Return `BankTiers` as they are, or build them from a mapping of arguments; None gives the defaults."""
        if tiers is None or isinstance(tiers, BankTiers):
            return tiers or cls()
        names = [one.name for one in fields(cls)]
        if not isinstance(tiers, Mapping):
            raise ValueError(f"tiers is {tiers!r}; expected BankTiers or a mapping with the keys {', '.join(names)}.")
        for name in tiers:
            if name not in names:
                raise ValueError(f"tiers has {name!r}; expected keys among {', '.join(names)}.")
        return cls(**tiers)

    def check(self, layout: BankLayout) -> None:
        """Raise an error if the tree of a bank lacks a level that the tiers name."""
        for level in self.levels:
            if level > layout.num_levels:
                raise ValueError(
                    f"tiers names level {level}; expected 1 to {layout.num_levels}, the levels of the tree."
                )

    def of_level(self, level: int) -> Tier:
        """Return the tier of a level."""
        return self.levels.get(level, "memory")


@dataclass
class TierStatistics:
    """Counts of one tier's blocks since the bank was opened.

    Args:
        hits: Fetched blocks that the tier had kept.
        misses: Fetched blocks that had to be read. In `disk`, all have to be read.
        ahead: Misses whose read was begun ahead of the fetch.
        read_bytes: Bytes of the misses.
        held_bytes: Bytes that the tier holds now.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    read_bytes: int = 0
    held_bytes: int = 0

    def plus(self, other: "TierStatistics") -> "TierStatistics":
        """Return the sum with the statistics of another bank."""
        return TierStatistics(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, earlier: "TierStatistics") -> "TierStatistics":
        """Return the counts added since earlier statistics. `held_bytes` remains the current value."""
        counts = {one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)}
        return TierStatistics(**{**counts, "held_bytes": self.held_bytes})


class KeptBlock(NamedTuple):
    """A block's record, `[numel]`, with the checksum that the file had for the block when the block was read."""

    record: torch.Tensor
    checksum: int


class KeptBlocks:
    """Recently fetched blocks, as many as `room` bytes hold. A block larger than the whole room is not kept."""

    def __init__(self, room: int):
        self.room, self.held_bytes = room, 0
        self._blocks: collections.OrderedDict[BlockKey, KeptBlock] = collections.OrderedDict()

    def get(self, key: BlockKey) -> KeptBlock | None:
        """Return a block and mark it as fetched last, or return None if the block is not kept."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: KeptBlock) -> None:
        """Keep a block, and drop the blocks that were fetched longest ago until there is room."""
        self.drop(key)
        if block.record.nbytes > self.room:
            return
        self._blocks[key] = block
        self.held_bytes += block.record.nbytes
        while self.held_bytes > self.room:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: BlockKey) -> None:
        """Drop a block if it is kept."""
        dropped = self._blocks.pop(key, None)
        self.held_bytes -= 0 if dropped is None else dropped.record.nbytes

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self.held_bytes = 0
