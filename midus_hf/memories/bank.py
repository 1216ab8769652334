"""Banks: data of memories in files next to weights, created, copied and counted with them; no torch.

A bank here, in `edits` and in messages is such files. In ops and layers, `bank` and `value_bank` are a tensor among the weights, the
table with a memory's values, as papers and checkpoints name it.

`memory_files` of a memory's options returns its subclass of `MemoryFiles`, if it has a bank. A model opens and saves its banks by
services (`midus_hf.memories.hosting.service`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from midus_hf.files.checkpoint_files import Kind
from midus_hf.memories.registry import MEMORY_TYPES, Memories, MemoryEntry


class MemoryFiles:
    """Bank of a memory in the folder of a checkpoint.

    Args:
        entry: The memory, as its model's config has it.
        memories: All memories of the model.
    """

    #: Patterns of the bank's files, relative to the folder; a `*` for a folder is replaced by the memory's name.
    files: ClassVar[Kind]

    def __init__(self, entry: MemoryEntry, memories: Memories):
        self.entry, self.memories = entry, memories

    def create(self, folder: Path, dtype: str, seed: int) -> None:
        """Create the bank of a new memory in a checkpoint's folder; random values depend on the seed."""
        raise NotImplementedError

    def copy(self, source: Path, folder: Path) -> None:
        """Copy the bank of the checkpoint `source` to another folder; a `RequestError` if it cannot be read."""
        raise NotImplementedError

    def bind_to_base(self, folder: Path) -> None:
        """Update the layers and the base of the model in files that name them. Default: no files do."""

    def paths(self, folder: Path) -> list[Path]:
        """Return the bank's files in a folder. Default: those that match its patterns, by the memory's name."""
        found = (
            path for pattern in self.files for path in folder.glob(pattern.replace("/*/", f"/{self.entry.name}/"))
        )
        return sorted(path for path in found if path.is_file())

    def num_bytes(self, folder: Path) -> int:
        """Return the bytes that the bank takes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.paths(folder))

    @property
    def parameters(self) -> int:
        """Number of parameters in the bank. Default: 0, for data other than tensors."""
        return 0

    @property
    def fetched(self) -> int:
        """Number of its parameters that a text reads. Default: 0."""
        return 0


def banks_of(memories: Memories) -> dict[str, MemoryFiles]:
    """Return the banks of a model's memories, by the name of the memory."""
    classes: Mapping[str, type[MemoryFiles] | None] = {
        name: entry.options.memory_files() for name, entry in memories.attached.items()
    }
    return {name: cls(memories.attached[name], memories) for name, cls in classes.items() if cls is not None}


def bank_patterns() -> Kind:
    """Return the patterns of the files of all known banks, relative to a checkpoint's folder."""
    classes = [options_class.memory_files() for options_class in MEMORY_TYPES.values()]
    return tuple(dict.fromkeys(pattern for cls in classes if cls is not None for pattern in cls.files))
