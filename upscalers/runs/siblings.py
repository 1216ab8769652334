"""Files beside the weights of a checkpoint that was made from another one."""

from pathlib import Path

from upscalers.architecture.families import MEMORY_PREFIX
from upscalers.architecture.family import Config
from upscalers.checkpoint.banks import tie_banks
from upscalers.checkpoint.base_model import open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files


def write_part(source: Path, partial: Path, config: Config) -> None:
    """Write the files beside the weights of a checkpoint that holds a part of another one's tensors.

    Args:
        source: Folder of the other checkpoint.
        partial: Folder of the result, with its weights and banks.
        config: Raw config of the result.
    """
    copy_travelling_files(source, partial)
    write_config(partial, config)
    tie_banks(partial, open_base(partial).layout.memories.banks)
    if str(config.get("model_type")).startswith(MEMORY_PREFIX):
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True))
