"""The glossary of a checkpoint: the names and texts that packs read."""

from pathlib import Path

from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.memories.bank import Bank, bank_of
from midus_hf.memories.entries import Memories
from midus_hf.memories.packs.options import PacksOptions


@bank_of(PacksOptions)
class GlossaryFile(Bank):
    """The glossary, one file in the folder of the weights."""

    files = (GLOSSARY_FILE,)

    def create(self, folder: Path, dtype: str, seed: int) -> None:
        """Create a glossary without entries."""
        (folder / GLOSSARY_FILE).write_bytes(b"")

    def copy(self, source: Path, folder: Path) -> None:
        """Copy the glossary; if there is none, create one without entries."""
        path = source / GLOSSARY_FILE
        (folder / GLOSSARY_FILE).write_bytes(path.read_bytes() if path.is_file() else b"")


def has_glossary(memories: Memories) -> bool:
    """Return whether a model reads names and texts from a glossary."""
    return any(isinstance(entry.options, PacksOptions) for entry in memories.attached.values())
