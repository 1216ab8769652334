"""Source of a base: a folder or a hub id."""

import contextlib
import glob
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import first_few
from midus_hf.files.checkpoint_files import (
    ADAPTER_CONFIG,
    CARD,
    CARD_FILE,
    CONFIG,
    CONFIG_FILE,
    INDEX_FILE,
    RECORD,
    RECORD_FILE,
    SINGLE_FILE,
    TRAVELLING,
    WEIGHTS,
    Kind,
    indexed_weights,
    named_code,
    named_modules,
    refuse_lfs_pointers,
)
from midus_hf.memories.bank import bank_patterns
from midus_hf.sources.names import answer_of_hub, gguf_refusal
from upscalers.checkpoint.stored_weights import missing_weights
from upscalers.request.progress import Progress

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_CONFIGS = (CONFIG_FILE, RECORD_FILE)
_ANY_FOLDER = "*/*"


@dataclass(frozen=True)
class Source:
    """A base in a local folder, with the name that the user gave, without revision; a base of the hub has a commit."""

    name: str
    folder: Path
    revision: str | None = None

    @property
    def label(self) -> str:
        """Name of the base in records: its hub id, or the last part of a local path, so that records reveal no folders."""
        return self.name if self.revision is not None else Path(self.name).expanduser().resolve().name


def name_and_revision(base: str) -> tuple[str, str | None]:
    """Return the name of a base (a folder or hub id), and the branch, tag or commit after `@`; None if there is none."""
    name, at, revision = base.partition("@")
    if not at or Path(base).expanduser().exists():
        return base, None
    if not revision or Path(name).expanduser().exists():
        raise RequestError(
            f"{base!r} has no revision after '@', or is local, where there are none; expected a hub id with a branch, tag or commit."
        )
    return name, revision


@contextlib.contextmanager
def resolve_source(base: str, config_only: bool = False) -> Iterator[Source]:
    """Make a base (a folder, `config.json` or hub id with or without `@revision`) available in a folder within the context."""
    name, revision = name_and_revision(base)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        raise RequestError(f"{name!r} is {gguf_refusal(path)}")
    elif path.is_file() and path.name == "config.json":
        refuse_lfs_pointers(path.parent, CONFIG)
        yield Source(name, path.parent)
    elif path.is_dir():
        refuse_lfs_pointers(
            path, CONFIG, TRAVELLING, RECORD, CARD, bank_patterns(), *(() if config_only else (WEIGHTS,))
        )
        yield Source(name, path)
    elif path.is_file():
        raise RequestError(
            f"{name!r} is a file; expected a folder, a config.json or a hub id. Give the folder of the checkpoint."
        )
    elif _HUB_ID.match(name):
        folder = _download(name, revision, config_only)
        yield Source(name, folder, revision=folder.name)
    else:
        raise RequestError(f"{name!r} is neither a folder nor a hub id; expected one of them.")


def fetch_files(source: Source, *kinds: Kind) -> None:
    """Download files of some kinds next to the config of a source; nothing for a local folder."""
    if source.revision is not None:
        _fetch(source.name, source.revision, [pattern for kind in kinds for pattern in kind], ignored=_ANY_FOLDER)


def copy_travelling_files(folder: Path, target: Path, progress: Progress) -> None:
    """Copy a model's files other than weights and config; a message lists code of a tokenizer or processor, which is not run."""
    for file in travelling_files(folder):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    code = [file.name for file in named_code(folder)]
    if code:
        progress.note(
            f"{first_few(code)}, code of the base's tokenizer or processor, "
            f"{'is' if len(code) == 1 else 'are'} copied, and never run here."
        )


def travelling_files(folder: Path) -> list[Path]:
    """Return the files that `copy_travelling_files` copies from a folder, sorted."""
    matches = {file for pattern in TRAVELLING for file in folder.glob(pattern)} | {*named_code(folder)}
    return sorted(file for file in matches if file.is_file() and not file.name.startswith("."))


def _download(name: str, revision: str | None, config_only: bool) -> Path:
    """Fetch config and index first, then the rest of one copy of the model, leaving out copies in other formats."""
    below = [pattern for pattern in TRAVELLING if "/" in pattern]
    folder = _fetch(
        name, revision, _CONFIGS if config_only else (*_CONFIGS, INDEX_FILE, CARD_FILE, *below, *bank_patterns())
    )
    if config_only:
        return folder
    commit = folder.name  # so that all files are of one commit even if the branch moves meanwhile
    beside = (CONFIG_FILE, *TRAVELLING, ADAPTER_CONFIG)
    _fetch(name, commit, (*beside, SINGLE_FILE), ignored=_ANY_FOLDER)
    if named_modules(folder):
        _fetch(name, commit, (CONFIG_FILE, "*.py"), ignored=_ANY_FOLDER)
    if (folder / SINGLE_FILE).is_file():  # transformers prefers the single file where both exist
        return folder
    if (folder / INDEX_FILE).is_file():
        _fetch(name, commit, (CONFIG_FILE, *map(glob.escape, sorted(indexed_weights(folder)))))
        return folder
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(name, revision=commit)
    except Exception as error:
        raise _unavailable(name, error) from None
    raise RequestError(missing_weights(name, files))


def _fetch(name: str, revision: str | None, wanted: Iterable[str], ignored: str | None = None) -> Path:
    """Fetch the files of a repository that match the patterns; patterns without a match are ignored."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted), ignore_patterns=ignored))
    except HFValidationError as error:
        raise RequestError(f"{name!r} is no local folder and no hub id. {error}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise _unavailable(name, error) from None


def _unavailable(name: str, error: Exception) -> RequestError:
    """Return a message about a name that the hub did not resolve."""
    reason = answer_of_hub(error) or "the Hub cannot be reached (or HF_HUB_OFFLINE is set)"
    return RequestError(f"{name!r} is no local folder, and {reason}. Give a folder otherwise.")
