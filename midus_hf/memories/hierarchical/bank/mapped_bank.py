"""A bank of blocks for reading: one mapped file per level, of which a fetch takes rows."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANK_DESCRIPTION
from midus_hf.files.json_text import parse_json
from midus_hf.memories.hierarchical.bank.block_reader import BlockReader
from midus_hf.memories.hierarchical.bank.level_file import MappedLevel
from midus_hf.memories.hierarchical.blocks import BankLayout, level_file

DESCRIPTION_FORMAT = 4


class MappedBank(BlockReader):
    """Bank of a memory's blocks, for reading. The system caches pages of its files; only the last fetch is kept in addition."""

    def __init__(self, folder: str | os.PathLike, layout: BankLayout):
        self.folder = Path(folder)
        self.description: dict[str, Any] = read_description(self.folder, layout)
        super().__init__(layout.with_roots(self.description["roots"]))
        self.map_files()

    def map_files(self) -> None:
        """Map the files of all levels, again if they were mapped before."""
        layout = self.layout
        self._levels = {
            level: MappedLevel(self.folder / level_file(level), layout.num_records(level), layout.record_numel(level))
            for level in layout.levels
        }
        self.changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MappedBank":
        """Return this bank itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open the same bank for reading in another process."""
        return MappedBank, (self.folder.absolute(), self.layout)

    def grow(self, roots: int | None, tree: str | None = None, grown_from: Collection[str] = ()) -> None:
        """Allow paths to name nodes of a tree that has grown from the bank's: their blocks start as unwritten blocks."""
        # A tree as large as the bank's, from which the bank's was made, has topics that were deleted since, and restores them.
        is_earlier = tree in self.description["grown_from"] and roots != self.layout.blocks.nodes(1)
        if tree not in (None, self.description["tree"]) and not is_earlier:
            self.description |= {"tree": tree, "grown_from": list(grown_from)}
        if roots is not None and roots > self.layout.blocks.nodes(1):
            self.layout = self.layout.with_roots(roots)
            self.changed()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return next(iter(self._levels.values())).blocks.dtype

    @property
    def tree(self) -> str | None:
        """Fingerprint of the tree whose paths trained the blocks; None if unknown, as before any training."""
        return self.description["tree"]

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block; a block that was never written or was deleted is drawn from the bank's seed."""
        record = self._levels[level].row(index + 1)
        if record is not None:
            return record
        return initial_block(self.layout, level, index, self.description["seed"], self.dtype)

    def digest(self) -> str:
        """Return the SHA-256 of all blocks that were written, and of the seed that the others are drawn from."""
        digest = hashlib.sha256(str(self.description["seed"]).encode())
        for rows in self._levels.values():
            digest.update(rows.marks.numpy().tobytes())
            for row in rows.marked():
                record = rows.row(row)
                digest.update(b"" if record is None else record.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_description(folder: Path, layout: BankLayout) -> dict[str, Any]:
    """Read the description of a bank, and check that the bank belongs to the model whose config implies `layout`."""
    path = folder / BANK_DESCRIPTION
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"there is no memory bank in {folder} ({error.strerror}: {BANK_DESCRIPTION}); expected one beside the model."
        ) from None
    except ValueError:
        description = None
    if not isinstance(description, dict) or description.get("format") != DESCRIPTION_FORMAT:
        raise RequestError(f"{path} is not of format {DESCRIPTION_FORMAT}; expected a bank that this version reads.")
    difference = layout.difference(description.get("layout"))
    if difference:
        raise RequestError(
            f"the memory bank in {folder} belongs to another model: {difference}. Put the model's own there."
        )
    return description


def initial_block(layout: BankLayout, level: int, index: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the initial record of a block, `[numel]`, drawn in float32 and cast to `dtype`."""
    first_grown = layout.blocks.branching**level
    number = first_grown if index < 0 else index + (index >= first_grown)
    digest = hashlib.sha256(f"{seed}/{layout.memory_type}/{level}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    record = torch.zeros(layout.record_numel(level), dtype=torch.float32)
    for place in layout.records[level]:
        place.tensor.initial.fill(record[place.start : place.start + place.numel], generator)
    return record.to(dtype)
