"""Origins of a result, mostly digests: the texts, the base, the code and the machine."""

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison
from midus_hf.compare.runs import corpora_of
from midus_hf.compare.variants import Variant
from midus_hf.files.checkpoint_files import TOKENIZER, is_of
from midus_hf.version import __version__

# Parts of an origin, in the order of reports.
KINDS = ("data", "base", "code", "machine")
# A comparison does not continue with results that have other digests of these. The values are words for messages.
FIXED = {"data": "content of the corpus or of a text", "base": "content of the base"}

# Folder that holds the packages whose code computes results.
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("midus_hf", "upscalers")


class Inputs:
    """Digests of the texts and the base of a comparison that `plan` has resolved, each of which is read once."""

    def __init__(self, comparison: Comparison):
        self._comparison = comparison
        self._digests: dict[str, str] = {}
        self._base: str | None = None

    def digests_for(self, variant: Variant) -> dict[str, str]:
        """Return the digests `data` and `base` of the runs of a variant, 64 hexadecimal digits each.

        `data` covers the variant's corpus, all measured texts and questions of tasks. Of datasets on the Hub, only the name counts.
        """
        if self._base is None:
            self._base = base_digest(self._comparison.base)
        tasks = self._comparison.tasks
        questions = [] if tasks is None or not tasks.data else [tasks.data]
        paths = [*corpora_of(variant), *self._comparison.texts.values(), *questions]
        for path in paths:
            if path not in self._digests:
                self._digests[path] = text_digest(path)
        data = hashlib.sha256("\n".join(self._digests[path] for path in paths).encode())
        return {"data": data.hexdigest(), "base": self._base}


def text_digest(path: str) -> str:
    """Return the SHA-256 of a file, or of a folder's files in sorted order; of a name that is not a path, that of the name."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return hashlib.sha256(path.encode()).hexdigest()
    return _files_digest(folder, [folder] if folder.is_file() else folder.rglob("*"))


def base_digest(base: str) -> str:
    """Return the SHA-256 of a base's weights, config and tokenizer, which are fetched if the base is on the Hub."""
    from upscalers.checkpoint.source import resolve_source

    name = Path(base).expanduser()
    if name.is_file():
        return _files_digest(name, [name])
    with resolve_source(base) as source:
        files = [
            file
            for file in source.folder.iterdir()
            if file.suffix == ".safetensors" or file.name == "config.json" or is_of(file.name, TOKENIZER)
        ]
        return _files_digest(source.folder, files)


def _files_digest(root: Path, files: Iterable[Path]) -> str:
    """Return the SHA-256 of files and their names below a root, in sorted order. Anything else than files is left out."""
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        name = file.relative_to(root).as_posix() if file != root else ""
        digest.update(f"{name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def code() -> dict[str, Any]:
    """Return which code runs: `version`, the SHA-256 of `sources`, and in a clone the `commit` and whether sources are `changed`."""
    sources = [file for package in _PACKAGES for file in (_ROOT / package).rglob("*") if file.suffix in (".py", ".c")]
    named: dict[str, Any] = {"version": __version__, "sources": _files_digest(_ROOT, sources)}
    if (_ROOT / ".git").exists() and (commit := _git("rev-parse", "HEAD")):
        named |= {"commit": commit, "changed": bool(_git("status", "--porcelain", "--", *_PACKAGES))}
    return named


def _git(*arguments: str) -> str:
    """Return the output of a git command; empty if git is not installed, or the command fails."""
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """Return the machine of the process: processor, threads, versions of torch and transformers, and the device."""
    import torch
    import transformers

    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.processor() or platform.machine()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def short(kind: str, origin: Mapping[str, Any]) -> str:
    """Return one part of an origin as a few words for a report; of digests, the first eight digits."""
    value = origin.get(kind)
    if value is None:
        return "unknown"
    if kind == "code":
        return f"{value['version']} ({value['sources'][:8]})"
    if kind == "machine":
        versions = f"torch {value['torch']}, transformers {value['transformers']}"
        return f"{value['processor']}, {value['threads']} threads, {value['device']}, {versions}"
    return str(value)[:8]
