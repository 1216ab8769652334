"""The output folder of whatever writes a checkpoint."""

import os
from pathlib import Path

from midus_hf.files.ownership import check_replaceable
from midus_hf.files.whole_files import sync
from midus_hf.files.whole_folder import Replacing, WholeFolder
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress

REPLACING = Replacing("upscale", check_replaceable, RequestError)


class OutputFolder(WholeFolder):
    """A `WholeFolder` that takes the place of a checkpoint of ours and of nothing else, and lies apart from the base.

    Args:
        path: The output, `~` allowed. A link stands for what it points to.
        base: The base folder, which must neither contain the output nor lie inside it; None if there is none.
        overwrite: Whether an existing checkpoint may be replaced, if `check_replaceable` lets it pass.

    Raises:
        RequestError: If the output has no name, exists, lies inside the base or around it, cannot be written, or is being written by
            another run.
    """

    def __init__(self, path: str | Path, base: Path | None = None, overwrite: bool = False):
        if path == "":  # which would stand for the folder that the command was started in
            raise RequestError("output is ''; expected the folder to make. Pass --output DIR.")
        self._base = base
        super().__init__(Path(path).expanduser(), REPLACING, overwrite)

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
        """Force what has been written so far to the disk; what is written afterwards is left to `commit`.

        Args:
            progress: Told of every byte that is on the disk.
        """
        sizes = {file: file.stat().st_size for file in self.partial.rglob("*")}
        progress.stage("waiting for the disk", sum(sizes.values()), "bytes")
        for file, num_bytes in sizes.items():
            sync(file)
            progress.advance(num_bytes)
