"""Output folder of all commands that write a checkpoint."""

import os
from pathlib import Path

from midus_hf.files.whole_files import sync
from midus_hf.files.whole_folder import WholeFolder
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
