"""Where a base comes from and a result goes: folders, the Hub, and the files other than weights."""

import contextlib
import glob
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from midus_hf.config.errors import RequestError, first_few
from midus_hf.files.checkpoint_files import (
    ADAPTER_CONFIG,
    CARD,
    CARD_FILE,
    CONFIG,
    CONFIG_FILE,
    CONFIGS_WITH_CODE,
    CUSTOM_GENERATE,
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
from midus_hf.memories.bank import MemoryFiles, bank_patterns
from midus_hf.sources.downloads import fetching
from midus_hf.sources.names import HUB_ID, answer_of_hub, gguf_refusal
from upscalers.checkpoint.safetensors_format import missing_weights
from upscalers.request import Progress, one_line

# What `open_base` reads of a checkpoint without weights.
_CONFIGS = (CONFIG_FILE, RECORD_FILE, ADAPTER_CONFIG)
_ANY_FOLDER = "*/*"


@dataclass(frozen=True)
class Source:
    """A base in a local folder, by the name that the user gave; one of the hub has a commit."""

    name: str
    folder: Path
    revision: str | None = None

    @property
    def label(self) -> str:
        """Name in records: a hub id, or the last part of a local path, so that records reveal no folders."""
        return self.name if self.revision is not None else Path(self.name).expanduser().resolve().name

    @property
    def hub_id(self) -> str | None:
        """`owner/name@COMMIT` of a base on the hub."""
        return None if self.revision is None else f"{self.name}@{self.revision}"


@contextlib.contextmanager
def resolve_source(base: str, config_only: bool = False, needs: Sequence[Kind] = ()) -> Iterator[Source]:
    """Make a base (a folder, `config.json` or hub id with optional `@revision`) available in a folder.

    Of the hub, all that `upscale` copies is downloaded, or with `config_only` only the config and the record; and files of the
    kinds in `needs`.
    """
    name, at, after = base.partition("@")
    if not at or Path(base).expanduser().exists():
        name = base
        after = ""
    elif not after or Path(name).expanduser().exists():
        raise RequestError(
            f"{base!r} has no revision after '@', or is local, where there are none; expected a hub id with a branch, tag or commit."
        )
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
    elif HUB_ID.fullmatch(name):
        folder = _download(name, after or None, config_only, needs)
        yield Source(name, folder, revision=folder.name)
    else:
        raise RequestError(f"{name!r} is neither a folder nor a hub id; expected one of them.")


def fetch_code(source: Source) -> None:
    """Download the code of a source of the Hub and what names it, unexecuted; nothing for a local folder."""
    if source.revision is not None:
        _fetch(source.name, source.revision, (*CONFIGS_WITH_CODE, "*.py"), ignored=_ANY_FOLDER)
        _fetch(source.name, source.revision, (CONFIG_FILE, CUSTOM_GENERATE))


def copy_travelling_files(folder: Path, target: Path, progress: Progress) -> None:
    """Copy a model's files other than weights and config; note code of a tokenizer, which is not run."""
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


def _download(name: str, revision: str | None, config_only: bool, needs: Sequence[Kind]) -> Path:
    """Return the folder of a Hub model's files, all of one commit: config, needed files, weights."""
    wanted = [*chain(*needs), *(() if config_only else (*TRAVELLING, SINGLE_FILE))]
    first = _CONFIGS if config_only else (*_CONFIGS, INDEX_FILE, CARD_FILE, *bank_patterns())
    folder = _fetch(name, revision, (*first, *(pattern for pattern in wanted if "/" in pattern)))
    commit = folder.name  # so that all files are of one commit even if the branch moves meanwhile
    if wanted:
        _fetch(name, commit, (CONFIG_FILE, *wanted), ignored=_ANY_FOLDER)
    if config_only:
        return folder
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with fetching(name):
            folder = snapshot_download(name, revision=revision, allow_patterns=list(wanted), ignore_patterns=ignored)
        return Path(folder)
    except HFValidationError as error:
        raise RequestError(f"{name!r} is no local folder and no hub id. {error}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise _unavailable(name, error) from None


def _unavailable(name: str, error: Exception) -> RequestError:
    reason = answer_of_hub(error) or "the Hub cannot be reached (or HF_HUB_OFFLINE is set)"
    return RequestError(f"{name!r} is no local folder, and {reason}. Give a folder otherwise.")


def check_repo_id(repo_id: str) -> None:
    """Raise `RequestError` if the hub allows no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RequestError(f"push-to-hub is {repo_id!r}; expected a repository such as me/model. {error}") from None


def check_account(repo_id: str) -> None:
    """Refuse, before anything is downloaded, if there is no hub login or the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        with fetching("the account of the token"):
            HfApi().whoami()
    except Exception as error:
        raise _refusal(repo_id, error) from None


def prepare_repository(repo_id: str, private: bool) -> str:
    """Create a result's repository unless it exists, before the first byte; return its name with owner."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
        public = private and api.repo_info(repository).private is False
    except Exception as error:
        raise _refusal(repo_id, error) from None
    if public:
        raise RequestError(
            f"push-to-hub is {repository!r}, which exists and is public; expected a new or a private repository with "
            "--private. Make it private in its settings on the hub, or choose another one."
        )
    return repository


def _refusal(repo_id: str, error: Exception) -> RequestError:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    reason = one_line(error)
    if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
        return RequestError(
            f"push-to-hub is {repo_id!r}, but the Hub does not let this account write there ({reason}); expected your own "
            "repository, or one of an organisation with write access. Log in with 'hf auth login' and a token with write access."
        )
    answer = answer_of_hub(error) or f"the Hub does not answer ({type(error).__name__}: {reason}); try again later"
    return RequestError(f"push-to-hub is {repo_id!r}, but {answer}, or upload the output afterwards.")


def push_folder(folder: Path, repository: str) -> str:
    """Upload the folder of a complete checkpoint in one commit, and return the address of the commit."""
    from huggingface_hub import HfApi

    commit = HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload upscaled checkpoint")
    return str(commit.commit_url)


def total_bank_bytes(folder: Path, banks: Mapping[str, MemoryFiles]) -> int:
    return sum(bank.num_bytes(folder) for bank in banks.values())
