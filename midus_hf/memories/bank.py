"""Banks: data of memories in files next to weights, created, copied and counted with them; no torch.

A memory with a bank has a module `bank_files` in the folder of its options, with `MemoryFiles` under
`@register_memory_files(Options)`. A model opens and saves its banks by services (`midus_hf.memories.hosting.service`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

from midus_hf.files.checkpoint_files import Kind
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES, Memories, MemoryEntry, import_beside

AnyBank = TypeVar("AnyBank", bound="type[MemoryFiles]")

_BANK_OF: dict[type[MemoryOptions], "type[MemoryFiles]"] = {}


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


def register_memory_files(options_class: type[MemoryOptions]) -> Callable[[AnyBank], AnyBank]:
    """Return a decorator that makes a class the bank of memories with these options, or extended ones."""

    def decorate(cls: AnyBank) -> AnyBank:
        _BANK_OF[options_class] = cls
        return cls

    return decorate


def bank_class(options_class: type[MemoryOptions]) -> type[MemoryFiles] | None:
    """Return the class of a memory's bank, imported from the folder of its options; None without one."""
    import_beside(options_class.__module__, "bank_files")
    return next((_BANK_OF[kind] for kind in options_class.__mro__ if kind in _BANK_OF), None)


def banks_of(memories: Memories) -> dict[str, MemoryFiles]:
    """Return the banks of a model's memories, by the name of the memory."""
    classes: Mapping[str, type[MemoryFiles] | None] = {
        name: bank_class(type(entry.options)) for name, entry in memories.attached.items()
    }
    return {name: cls(memories.attached[name], memories) for name, cls in classes.items() if cls is not None}


def bank_patterns() -> Kind:
    """Return the patterns of the files of all known banks, relative to a checkpoint's folder."""
    classes = (bank_class(options_class) for options_class in MEMORY_TYPES.values())
    return tuple(dict.fromkeys(pattern for cls in classes if cls is not None for pattern in cls.files))
