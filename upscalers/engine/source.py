"""Where a base comes from: a folder, a hub id, or a GGUF file."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upscalers.engine.errors import RequestError, one_line

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
_WANTED_CONFIGS = ("config.json", "upscale.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl")
_MORE_CHAT_TEMPLATES = "additional_chat_templates"
_OWN_FILES = ("config.json", "upscale.json", "README.md", "model.safetensors.index.json")


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
        with tempfile.TemporaryDirectory(prefix="upscale-gguf-") as folder:
            _convert_gguf(path, Path(folder))
            yield Source(name, Path(folder))
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
    for file in _travelling_files(folder):
        place = target / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def _travelling_files(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in _OWN_FILES
        and file.suffix not in (*_WEIGHT_SUFFIXES, ".py")
        and not file.name.endswith(".index.json")
    ] + sorted((folder / _MORE_CHAT_TEMPLATES).glob("*.jinja"))


def _download(name: str, config_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED_CONFIGS if config_only else _WANTED)))
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


def _convert_gguf(path: Path, folder: Path) -> None:
    """Dequantise a GGUF file to a float32 checkpoint through transformers' loader."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise RequestError(
            f"base {path.name} is a GGUF file; expected the gguf package. Install midus-hf[gguf]."
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise RequestError(
            f"transformers cannot read {path.name} ({type(error).__name__}: {one_line(error)}). Download it again, or give "
            "the safetensors checkpoint it was made from."
        ) from None
    # The loader dequantises but leaves its quantiser behind, with which the model refuses to be saved.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
