"""Where a base comes from: a folder, a hub id, or a GGUF file."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upscalers.engine.base_model import pickled_message
from upscalers.engine.errors import RequestError
from upscalers.engine.gguf import convert_gguf
from upscalers.engine.tokenizer import has_tokenizer

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_TRAVELLING = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""What belongs to a model beside its weights and config."""

_WANTED_CONFIGS = ("config.json", "upscale.json")
_WANTED = (*_WANTED_CONFIGS, *_TRAVELLING, "*.safetensors", "*.safetensors.index.json", "adapter_config.json")


@dataclass(frozen=True)
class Source:
    """A base that lies in a folder.

    Args:
        name: As the person gave it.
        folder: Where it lies.
        revision: The commit of a hub repository; None for local bases.
    """

    name: str
    folder: Path
    revision: str | None = None

    @property
    def label(self) -> str:
        """What records call the base: its hub id, or the last part of its path, which is nobody else's business."""
        return self.name if self.revision is not None else Path(self.name).expanduser().resolve().name


@contextlib.contextmanager
def resolve_source(name: str, config_only: bool = False) -> Iterator[Source]:
    """Bring the base into a folder for as long as it is needed.

    Args:
        name: A folder, a `.gguf` file, or a hub id.
        config_only: Whether `config.json` suffices. Default: False.

    Raises:
        RequestError: If there is no such base.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        with tempfile.TemporaryDirectory(prefix="upscale-gguf-") as temporary:
            convert_gguf(path, Path(temporary), config_only)
            yield Source(name, Path(temporary))
    elif path.is_file() and path.name == "config.json":
        yield Source(name, path.parent)
    elif path.is_dir():
        yield Source(name, path)
    elif _HUB_ID.match(name):
        folder = _download(name, config_only)
        yield Source(name, folder, revision=folder.name)
    else:
        raise RequestError(f"base {name!r} is no folder, no .gguf file and no hub id; expected one of them.")


def copy_travelling_files(folder: Path, target: Path) -> None:
    """Copy what belongs to a model beside its weights and config: tokenizer, chat templates, generation config, licence."""
    for file in travelling_files(folder):
        place = target / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def travelling_files(folder: Path) -> list[Path]:
    """What a folder holds of that, sorted."""
    found = {file for pattern in _TRAVELLING for file in folder.glob(pattern)}
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def _download(name: str, config_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_WANTED_CONFIGS if config_only else _WANTED)))
    except GatedRepoError:
        raise RequestError(
            f"base {name!r} is gated; accept its terms on the hub and log in with 'hf auth login'."
        ) from None
    except HFValidationError as error:
        raise RequestError(f"base {name!r} is no local folder and no hub id. {error}") from None
    except RepositoryNotFoundError:
        raise RequestError(
            f"base {name!r} is no local folder and was not found on the hub. Check its spelling."
        ) from None
    except LocalEntryNotFoundError:
        raise RequestError(
            f"base {name!r} is no local folder, and the hub cannot be reached (or HF_HUB_OFFLINE is set). Give a folder."
        ) from None
    if not config_only and not any(folder.glob("*.safetensors")):
        _explain_missing_weights(name)
    return folder


def _explain_missing_weights(name: str) -> None:
    """Say which weights a repository without safetensors has instead."""
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name)
    pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise RequestError(pickled_message(name, pickled[0], has_tokenizer(files)))
    raise RequestError(
        f"base {name!r} holds no safetensors on the hub; expected model.safetensors or an index of shards."
    )
