"""Banks of blocks: parameters in files next to a checkpoint; each text fetches a few."""

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANK_DESCRIPTION, TREE_FILES, parse_json
from midus_hf.files.outputs import atomic_write, write_text
from midus_hf.memories.hierarchical.options import GENERIC, BankLayout, level_file
from midus_hf.memories.options import package_only

__all__ = ["MemoryBank"]

# Level of a block, counted from 1, and its node; -1 for the generic memory.
BlockKey = tuple[int, int]
Records = Mapping[BlockKey, Callable[[], torch.Tensor]]

DESCRIPTION_FORMAT = 4
# In a level's file, row 0 is the block of the generic memory, and row i + 1 that of node i.
# Marks of rows. No mark is 0, since a file system that is damaged leaves pages of zeros.
UNWRITTEN, WRITTEN, DELETED = 1, 2, 3
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PAGE = 4096


@dataclass(frozen=True)
class FetchedLevel:
    """A level's blocks for a layer: tensors by name, `[U, ...]`, and the block of each row, `[B]`, int64."""

    tensors: Mapping[str, torch.Tensor]
    blocks: torch.Tensor


# Blocks for one layer, by level.
FetchedLayer = tuple[FetchedLevel, ...]


class FetchedBatch:
    """Blocks fetched for a batch, by level from 1: records `[U, numel]`, and each row's, `[B]`, int64."""

    def __init__(self, layout: BankLayout, records: Mapping[int, torch.Tensor], blocks: Mapping[int, torch.Tensor]):
        self.layout, self.records, self.blocks = layout, dict(records), dict(blocks)
        # Split once, so that the gradients of all tensors are concatenated once.
        parts = {
            level: self.records[level].split([field.numel for field in fields], dim=1)
            for level, fields in layout.records.items()
        }
        tensors: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        for level, fields in layout.records.items():
            for field, part in zip(fields, parts[level], strict=True):
                of_layer = tensors.setdefault((field.layer, level), {})
                of_layer[field.name] = part.view(len(part), *field.tensor.shape)
        self._layers = {
            layer: tuple(FetchedLevel(tensors[layer, level], self.blocks[level]) for level in layout.records)
            for layer in layout.layers
        }

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch, B."""
        return len(next(iter(self.blocks.values())))

    def blocks_for(self, layer: int) -> FetchedLayer:
        """Return the blocks for a layer of the model, by the layer's index."""
        return self._layers[layer]

    def to(self, device: Any, non_blocking: bool = False) -> "FetchedBatch":
        """Return the batch on another device, or this batch itself if it is there already."""
        records = {level: record.to(device, non_blocking=non_blocking) for level, record in self.records.items()}
        if all(record is self.records[level] for level, record in records.items()):
            return self
        blocks = {level: block.to(device, non_blocking=non_blocking) for level, block in self.blocks.items()}
        return FetchedBatch(self.layout, records, blocks)


class BlockReader(ABC):
    """Interface for reading blocks of a tree: each row of a batch fetches one block per level."""

    # Whether a fetch with gradients enabled belongs to an autograd graph, and therefore serves one pass only.
    trains: bool = False

    def __init__(self, layout: BankLayout):
        self.layout = layout
        self._latest: tuple[Any, FetchedBatch] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    @abstractmethod
    def block(self, level: int, index: int) -> torch.Tensor:
        """Return a block's record (level from 1; node -1: generic), `[numel]`, on the CPU; do not modify it."""

    def changed(self) -> None:
        """Forget the latest fetch because a block has changed."""
        self._latest = None

    def fetch(
        self, memory_ids: torch.Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> FetchedBatch:
        """Fetch blocks on paths, `[B, p]`: a node per level of the tree, or a row of -1: the generic memory."""
        check_paths(memory_ids, self.layout, "memory_ids")
        paths = memory_ids.tolist()
        request = (paths, torch.device(device), dtype)
        wants_gradients = torch.is_grad_enabled()
        serves_again = not (self.trains and wants_gradients)
        latest = self._latest  # read once, since another thread may replace it
        if serves_again and latest is not None and latest[0] == request:
            return latest[1]  # generation fetches the same blocks at every token
        records, blocks = {}, {}
        # A later pass with gradients may reuse this fetch, so its tensors must not be inference tensors. Leaving inference
        # mode turns gradients on; the second context restores the caller's setting.
        with torch.inference_mode(False), torch.set_grad_enabled(wants_gradients):
            for level in self.layout.levels:
                nodes = [path[level - 1] for path in paths]
                positions = {node: position for position, node in enumerate(dict.fromkeys(nodes))}
                records[level] = torch.stack([self.block(level, node) for node in positions]).to(device, dtype)
                blocks[level] = torch.tensor([positions[node] for node in nodes], device=device)
            fetched = FetchedBatch(self.layout, records, blocks)
        if serves_again:
            self._latest = (request, fetched)
        return fetched


def check_paths(paths: torch.Tensor, layout: BankLayout, name: str) -> None:
    """Refuse paths with a node for which a bank has no block."""
    levels, k = layout.num_levels, layout.blocks.branching
    if paths.dim() != 2 or paths.shape[1] != levels or paths.dtype.is_floating_point:
        raise RequestError(
            f"{name} is {tuple(paths.shape)}, {paths.dtype}; expected integers [batch, {levels}], for each row a node of each "
            "level of the tree."
        )
    paths = paths.cpu()
    in_tree = (paths != GENERIC).any(1, keepdim=True)
    counts = torch.tensor([layout.blocks.nodes(level) for level in range(1, levels + 1)])
    for row, column in (in_tree & ((paths < 0) | (paths >= counts))).nonzero().tolist():
        raise RequestError(
            f"{name} has {int(paths[row, column])} for level {column + 1} in row {row}; expected 0 to {int(counts[column]) - 1}, "
            "or a row of -1 for the generic memory."
        )
    for row, column in (in_tree & (paths[:, 1:] // k != paths[:, :-1])).nonzero().tolist():
        parent, node = paths[row, column : column + 2].tolist()
        raise RequestError(
            f"{name} has {node} for level {column + 2} in row {row}, which is no child of node {parent}; expected {k * parent} to "
            f"{k * parent + k - 1}. Take paths of the tree that the model is for."
        )


class MappedLevel:
    """The rows of a level's file, mapped: pages that are read are cached, and shared by processes."""

    def __init__(self, path: Path, rows: int, numel: int):
        self.path = path
        try:
            with safetensors.safe_open(path, "np") as file:
                blocks, self.marks = file.get_slice("blocks"), torch.from_numpy(file.get_tensor("marks"))
                shape, dtype = blocks.get_shape(), _DTYPES[blocks.get_dtype()]
            self.blocks = _map_blocks(path, math.prod(shape), dtype, len(self.marks)).view(shape)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
            raise RequestError(
                f"bank file {path} cannot be read ({error}); expected a whole file of a bank. Copy the bank again."
            ) from None
        # A save that was killed may have left more rows than the description has.
        if self.blocks.dim() != 2 or self.blocks.shape[1] != numel or not rows <= len(self.blocks) == len(self.marks):
            raise RequestError(
                f"bank file {path} has blocks of shape {list(self.blocks.shape)}; expected {[rows, numel]}. It belongs to "
                "another model."
            )

    def row(self, row: int) -> torch.Tensor | None:
        """Return a row, `[numel]`, mapped from the file; None if it was never written or was deleted."""
        mark = int(self.marks[row]) if row < len(self.marks) else UNWRITTEN
        if mark not in (UNWRITTEN, WRITTEN, DELETED):
            block = f"block {row - 1}" if row else "the generic block"
            raise RequestError(
                f"{block} of bank file {self.path} is without its mark. Copy the bank again, or delete the block."
            )
        return self.blocks[row] if mark == WRITTEN else None

    def marked(self) -> list[int]:
        """Return the rows that were written or deleted, or whose mark was lost, ascending."""
        return (self.marks != UNWRITTEN).nonzero().flatten().tolist()

    def rows(self, mark: int) -> list[int]:
        """Return the rows with a mark, ascending."""
        return (self.marks == mark).nonzero().flatten().tolist()


def _map_blocks(path: Path, count: int, dtype: torch.dtype, num_marks: int) -> torch.Tensor:
    # Safetensors maps for torch what could be written too, which Linux refuses for a file larger than the machine's memory.
    start = path.stat().st_size - num_marks - count * dtype.itemsize
    with path.open("rb") as file, warnings.catch_warnings():
        # Torch warns of memory that cannot be written, which nothing here does.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)


def write_level(
    path: Path,
    rows: int,
    numel: int,
    dtype: torch.dtype,
    records: Mapping[int, Callable[[], torch.Tensor]],
    deleted: Collection[int] = (),
) -> None:
    """Write the file of a level atomically. Rows that are not written are holes: zeros that take no space."""
    row_bytes, end = numel * dtype.itemsize, rows * numel * dtype.itemsize
    header = {
        "blocks": {"dtype": SAFETENSORS_DTYPES[dtype], "shape": [rows, numel], "data_offsets": [0, end]},
        "marks": {"dtype": "U8", "shape": [rows], "data_offsets": [end, end + rows]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)  # so that the tensors begin at a page
    head = struct.pack("<Q", len(text)) + text
    marks = bytearray([UNWRITTEN]) * rows
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(head)
        for row, record in sorted(records.items()):
            file.seek(len(head) + row * row_bytes)
            file.write(record().detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
            marks[row] = WRITTEN
        for row in deleted:
            marks[row] = DELETED
        file.seek(len(head) + end)
        file.write(marks)


class MemoryBank(BlockReader):
    """Bank of a memory's blocks: a mapped file per level. Saving, which changes it, writes whole files.

    The system caches pages of the files; only the last fetch is kept in addition.
    """

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

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBank, (self.folder.absolute(), self.layout)

    @package_only
    def grow(self, roots: int | None, tree: str | None = None, grown_from: Collection[str] = ()) -> None:
        """Allow paths to a tree grown from the bank's; blocks of its new nodes start as unwritten blocks."""
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
        """Return the record of a block, drawn from the bank's seed if it was never written or was deleted."""
        record = self._levels[level].row(index + 1)
        if record is not None:
            return record
        return initial_block(self.layout, level, index, self.description["seed"], self.dtype)

    def written(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were written, ascending; -1 for the generic memory."""
        return [row - 1 for row in self._levels[level].marked() if self.is_written(level, row - 1)]

    def deleted(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were deleted and not written again, ascending."""
        return [row - 1 for row in self._levels[level].rows(DELETED)]

    def is_written(self, level: int, index: int) -> bool:
        """Return whether a block was written, and not deleted since."""
        return self._levels[level].row(index + 1) is not None

    def digest(self) -> str:
        """Return the SHA-256 of all blocks that were written, and of the seed that the others are drawn from."""
        digest = hashlib.sha256(str(self.description["seed"]).encode())
        for rows in self._levels.values():
            digest.update(rows.marks.numpy().tobytes())
            for row in rows.marked():
                record = rows.row(row)
                digest.update(b"" if record is None else record.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Write the record of a block, `[numel]`, into the bank's files."""
        self.save(self.folder, {(level, index): lambda: record})

    def save(
        self,
        folder: str | os.PathLike,
        trained: Records | None = None,
        tree: str | None = None,
        tree_folder: Path | None = None,
        deleted: Collection[BlockKey] = (),
    ) -> None:
        """Write the bank into a folder. Blocks that were never written, or were deleted, are holes there.

        In the folder of this bank, files of levels without a change are kept.

        Args:
            folder: Folder of the copy, which is created if missing.
            trained: For each changed block, by level and node, a function that returns the new record. Default: no changes.
            tree: Fingerprint of the tree whose paths trained `trained`. Default: the tree of this bank.
            tree_folder: Folder with that tree's files, which are copied along. Default: this bank's, which may have none.
            deleted: Level and node of further blocks to delete, only in another folder than this bank's, whose files then never
                contain their bytes. Default: none; blocks deleted in this bank stay deleted.
        """
        save_bank(self, Path(folder), trained or {}, tree or self.tree, tree_folder or self.folder, deleted)


def save_bank(
    bank: MemoryBank,
    folder: Path,
    trained: Records,
    tree: str | None,
    tree_folder: Path,
    deleted: Collection[BlockKey],
) -> None:
    """Do the work of `MemoryBank.save`; in a checkpoint's own code, a copy of the folder."""
    in_place = folder.exists() and folder.samefile(bank.folder)
    assert not (in_place and deleted), "files that are replaced leave their bytes on the disk"
    if not in_place:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BANK_DESCRIPTION).unlink(missing_ok=True)  # marks a bank as complete, so it is written last
    for level, source in bank._levels.items():
        changed = {index + 1: record for (its_level, index), record in trained.items() if its_level == level}
        gone = {index + 1 for its_level, index in deleted if its_level == level}
        rows = bank.layout.num_records(level)
        if in_place and not changed and len(source.marks) == rows:
            continue
        kept = {
            row: source.blocks[row].detach
            for row in source.marked()
            if row not in changed and row not in gone and source.row(row) is not None
        }
        gone = {*gone, *source.rows(DELETED)} - changed.keys()
        write_level(folder / level_file(level), rows, source.blocks.shape[1], bank.dtype, {**kept, **changed}, gone)
    if folder.resolve() != tree_folder.resolve():
        for name in TREE_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in TREE_FILES if all((tree_folder / name).is_file() for name in TREE_FILES) else ():
            with atomic_write(folder / name) as partial:
                shutil.copyfile(tree_folder / name, partial)
    layout = bank.layout.to_dict()
    layout["base"] = layout["base"] or bank.description["layout"].get("base")
    description = {**bank.description, "layout": layout, "tree": tree, "roots": bank.layout.blocks.roots}
    write_description(folder, description)
    if in_place:
        bank.description = description
        bank.map_files()


def create_bank(folder: str | os.PathLike, layout: BankLayout, dtype: torch.dtype, seed: int) -> None:
    """Create a bank of unwritten blocks, drawn from the seed: a few pages on disk, and a byte per block."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for level in layout.levels:
        write_level(folder / level_file(level), layout.num_records(level), layout.record_numel(level), dtype, {})
    description = {"format": DESCRIPTION_FORMAT, "layout": layout.to_dict(), "seed": seed}
    write_description(folder, {**description, "tree": None, "roots": None, "grown_from": []})


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write a bank's description, which marks the bank as complete, and is written last."""
    write_text(folder / BANK_DESCRIPTION, json.dumps(description, indent=2) + "\n")


def read_description(folder: Path, layout: BankLayout) -> dict[str, Any]:
    """Read a bank's description, and check that it belongs to the model whose config implies `layout`."""
    path = folder / BANK_DESCRIPTION
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"there is no memory bank in {folder} ({error.strerror}: {BANK_DESCRIPTION}); expected one next to the model."
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
