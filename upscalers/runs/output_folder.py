"""Output folder of all commands that write a checkpoint, and the files beside the weights of one that was made from another one."""

import os
from pathlib import Path

from midus_hf.files.whole_files import sync
from midus_hf.files.whole_folder import WholeFolder
from upscalers.architecture.families import MEMORY_PREFIX
from upscalers.architecture.family import Config
from upscalers.checkpoint.banks import tie_banks
from upscalers.checkpoint.base_model import open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress


class OutputFolder(WholeFolder):
    """A `WholeFolder` that replaces only checkpoints that this package wrote, and lies apart from the base.

    Args:
        path: Path of the output; `~` is expanded, and a link stands for its target.
        base: The base folder, which must neither contain the output nor lie inside it; None if there is none. Default:
            None.
        overwrite: Whether an existing checkpoint may be replaced, if `check_replaceable` allows that. Default: False.

    Raises:
        RequestError: If the output has no name, exists, lies inside the base or around it, cannot be written, or is
            being written by another run.
    """

    error = RequestError

    def __init__(self, path: str | Path, base: Path | None = None, overwrite: bool = False):
        if path == "":  # an empty path would stand for the current folder
            raise RequestError("output is ''; expected the folder to make. Pass --output DIR.")
        self._base = base
        super().__init__(Path(path).expanduser(), overwrite)

    def _check(self) -> None:
        if self._base is not None:
            base = Path(os.path.realpath(self._base))
            if self.path.is_relative_to(base):
                raise RequestError(f"output {self.path} lies inside the base {base}; expected a folder elsewhere.")
            if base.is_relative_to(self.path):
                raise RequestError(
                    f"output {self.path} holds the base {base}, which --overwrite would delete; expected a folder elsewhere."
                )
        super()._check()

    def flush(self, progress: Progress) -> None:
        """Force all files written so far to the disk; later writes are left to `commit`.

        Args:
            progress: Display that shows how many bytes are on the disk.
        """
        sizes = {file: file.stat().st_size for file in self.partial.rglob("*")}
        progress.stage("waiting for the disk", sum(sizes.values()), "bytes")
        for file, num_bytes in sizes.items():
            sync(file)
            progress.advance(num_bytes)


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
