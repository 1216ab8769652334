"""Answers of `midus eval` about the models of a run, kept in files, so that an interrupted run does not measure a model again."""

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
    """Evaluations of a run, each kept as a JSON file in the folder `evaluations` of the run.

    A kept evaluation is used again if its arguments are the same, and if all files that these arguments name, the model's files
    among them, have the same names, sizes and modification times. A model that was trained again or a text that was edited is thus
    measured again. A model that is no local folder, such as one of the Hub, is measured every time.

    Args:
        folder: Folder of the run.
        comparison: The comparison, which says whether remote code is trusted.
        commands: Runner of `midus eval`.
    """

    def __init__(self, folder: Path, comparison: Comparison, commands: Commands):
        self._folder = folder / _FOLDER
        self._trust = ["--trust-remote-code"] if comparison.trust_remote_code else []
        self._commands = commands

    def measure(self, step: str, model: str | Path, *arguments: Any) -> Mapping[str, Any]:
        """Return what `midus eval --json` reports of a model, from a kept file where possible.

        Args:
            step: Name of the evaluation, which its kept file and its log carry.
            model: Folder or Hub id of the model.
            arguments: Other arguments of `midus eval`.

        Raises:
            StepFailed: If the command fails.
        """
        line = [str(word) for word in (model, "--json", *arguments, *self._trust)]
        path = self._folder / f"{step}.json"
        request = {"words": line, "files": [_files(Path(word)) for word in line]}
        if os.path.isdir(model) and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["asked"] == request:
                return kept["told"]
        answer = json.loads(self._commands.run(step, "midus eval", *line).output)["models"][0]
        self._folder.mkdir(exist_ok=True)
        with whole_file(path) as written:
            written.write_text(json.dumps({"asked": request, "told": answer}, indent=1), encoding="utf-8")
        return answer


def _files(path: Path) -> str | None:
    """Return a digest of the names, sizes and modification times of a file or of all files of a folder; None if neither exists."""
    # `os.path` answers False for arguments that no file name can hold, where `Path` may raise.
    files = sorted(path.rglob("*")) if os.path.isdir(path) else [path]
    stats = [(file.relative_to(path), file.stat()) for file in files if os.path.isfile(file)]
    lines = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\0".join(lines).encode()).hexdigest() if lines else None
