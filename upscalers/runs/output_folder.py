"""Output folder of all commands that write a checkpoint, and the files beside the weights of one that was made from another one."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from midus_hf.config.backbone import MEMORY_PREFIX
from midus_hf.files.outputs import OutputFolder
from midus_hf.memories.hierarchical.blocks import BankLayout
from upscalers.architecture.family import Config
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks, carry_glossary, tie_banks
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress, shown
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, WriteSummary


class CheckpointFolder(OutputFolder):
    """An output folder whose errors are `RequestError`."""

    error = RequestError

    def free_bytes(self) -> int:
        """Return the free bytes of the output's disk, with what a killed run left there, which is removed first."""
        left = sum(file.lstat().st_blocks * 512 for file in self.partial.rglob("*") if not file.is_dir())
        return shutil.disk_usage(self.disk).free + left

    def check_space(self, num_bytes: int) -> None:
        """Raise `RequestError` if the disk has less room than `num_bytes` bytes."""
        free = self.free_bytes()
        if free < num_bytes:
            raise RequestError(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Make room or "
                "choose another disk."
            )


@contextlib.contextmanager
def written_from(
    model: BaseCheckpoint,
    folder: CheckpointFolder,
    shards: dict[str, list[OutputTensor]],
    banks: Mapping[str, BankLayout],
    progress: Progress,
    copied: Callable[[str], None] = lambda name: None,
    stored_name: Callable[[str], str] = lambda name: name,
) -> Iterator[WriteSummary]:
    """Write tensors and banks to a folder that appears after the block, which writes the files beside them to `folder.partial`."""
    num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    folder.check_space(num_bytes + bytes_of_banks(model.folder, banks))
    with shown(progress), folder.writing() as partial:
        writer = CheckpointWriter(model.tensors, scan=False, progress=progress, copied=copied, stored_name=stored_name)
        written = writer.write(partial, shards)
        carry_banks(model.folder, partial, banks)
        yield replace(written, bytes_written=written.bytes_written + bytes_of_banks(partial, banks))


def write_part(source: Path, partial: Path, config: Config, progress: Progress) -> None:
    """Write the files beside weights and banks of a checkpoint that has a part of the tensors of the one in the folder `source`."""
    copy_travelling_files(source, partial, progress)
    write_config(partial, config)
    memories = open_base(partial).layout.memories
    tie_banks(partial, memories.banks)
    carry_glossary(source, partial, memories)
    if str(config.get("model_type")).startswith(MEMORY_PREFIX):
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
