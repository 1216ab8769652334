"""Output folder of all commands that write a checkpoint, and the files other than weights of one that is made from another."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import Kind
from midus_hf.files.outputs import OutputFolder
from midus_hf.memories.bank import Bank, bank_patterns, banks_of
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.banks import bytes_of_banks, copy_banks, tie_banks
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.request.progress import Progress, shown
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, WriteSummary


class CheckpointFolder(OutputFolder):
    """An output folder that also replaces banks."""

    def own_files(self) -> Kind:
        return (*super().own_files(), *bank_patterns())

    def free_bytes(self) -> int:
        """Return the free bytes of the output's disk, after removing files that a killed run left there."""
        left = sum(file.lstat().st_blocks * 512 for file in self.partial.rglob("*") if not file.is_dir())
        return shutil.disk_usage(self.disk).free + left

    def check_space(self, num_bytes: int) -> None:
        """Raise `RequestError` if the disk has less free space than `num_bytes` bytes."""
        free = self.free_bytes()
        if free < num_bytes:
            raise RequestError(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Free some space or "
                "choose another disk."
            )


@contextlib.contextmanager
def written_from(
    model: BaseCheckpoint,
    folder: CheckpointFolder,
    shards: dict[str, list[OutputTensor]],
    banks: Mapping[str, Bank],
    progress: Progress,
    copied: Callable[[str], None] = lambda name: None,
    stored_name: Callable[[str], str] = lambda name: name,
) -> Iterator[WriteSummary]:
    """Write tensors and banks to a folder that appears after the block, which writes the other files to `folder.partial`."""
    num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    folder.check_space(num_bytes + bytes_of_banks(model.folder, banks))
    with shown(progress), folder.writing() as partial:
        writer = CheckpointWriter(model.tensors, scan=False, progress=progress, copied=copied, stored_name=stored_name)
        written = writer.write(partial, shards)
        copy_banks(model.folder, partial, banks)
        yield replace(written, bytes_written=written.bytes_written + bytes_of_banks(partial, banks))


def write_part(source: Path, partial: Path, config: Config, progress: Progress) -> None:
    """Write the files other than weights and banks of a checkpoint that has part of the tensors of the one in `source`."""
    copy_travelling_files(source, partial, progress)
    write_config(partial, config)
    tie_banks(partial, banks_of(open_base(partial).layout.memories))
    if str(config.get("model_type")).startswith(MEMORY_PREFIX):
        auto_map = write_code_of(partial)
        if "auto_map" not in config:  # as in a language model within a larger one, whose config has it
            write_config(partial, {**config, "auto_map": auto_map})


def write_code_of(folder: Path) -> dict[str, str]:
    """Write the code that a checkpoint's config needs into its folder, to load without this package; return its `auto_map`."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    write_code(folder, config)
    auto_map: dict[str, str] = config.to_dict()["auto_map"]
    return auto_map
