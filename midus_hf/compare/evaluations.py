"""What `midus eval` told of the models of a cell, kept, so that a run that was interrupted does not measure them again."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.compare.commands import Commands
from midus_hf.compare.options import Comparison
from midus_hf.files.whole_files import whole_file

_FOLDER = "evaluations"


class Evaluations:
    """Evaluations of a cell, each a file of JSON in `evaluations` of its folder.

    One is taken from its file as long as it was asked for in the same words, and the model and whatever else these name has the
    same files, of the same size and the same time of change. So it does not outlive a model that was trained again, nor a text
    that was edited. What is no folder here, as a model of the hub, is measured every time.

    Args:
        folder: Of the cell.
        comparison: What is asked for.
        commands: Runs commands.
    """

    def __init__(self, folder: Path, comparison: Comparison, commands: Commands):
        self._folder = folder / _FOLDER
        self._trust = ["--trust-remote-code"] if comparison.trust_remote_code else []
        self._commands = commands

    def measure(self, step: str, model: str | Path, *words: Any) -> Mapping[str, Any]:
        """What `midus eval --json` tells of a model.

        Args:
            step: Name of the evaluation.
            model: The model.
            words: Other arguments of `midus eval`.

        Raises:
            StepFailed: If the command fails.
        """
        line = [str(word) for word in (model, "--json", *words, *self._trust)]
        path = self._folder / f"{step}.json"
        asked = {"words": line, "files": [_files(Path(word)) for word in line]}
        if os.path.isdir(model) and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["asked"] == asked:
                return kept["told"]
        told = json.loads(self._commands.run(step, "midus eval", *line).output)["models"][0]
        self._folder.mkdir(exist_ok=True)
        with whole_file(path) as written:
            written.write_text(json.dumps({"asked": asked, "told": told}, indent=1), encoding="utf-8")
        return told


def _files(path: Path) -> str | None:
    """Digest of name, size and time of change of a file, or of all files of a folder; None where there is neither."""
    # Those of `os.path` take words that no file can be named by, too.
    found = sorted(path.rglob("*")) if os.path.isdir(path) else [path]
    stats = [(file.relative_to(path), file.stat()) for file in found if os.path.isfile(file)]
    lines = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\0".join(lines).encode()).hexdigest() if lines else None
