"""Check names of models, paths of texts and devices before anything is loaded that takes seconds."""

import codecs
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError, first_line, save_as_utf8
from midus_hf.files.checkpoint_files import read_json
from midus_hf.sources.downloads import fetching

_EXPECTED_SOURCES = {
    "config_name": "a file, a folder or a Hub id",
    "tokenizer_name": "a folder or a Hub id",
    "tree": "a tree of topics",
    "retriever": "a tree of topics",
    "data": "a folder with questions of tasks",
    "include_path": "a folder of task files",
}
_TEXT_SUFFIXES = {*".csv .json .jsonl .md .ndjson .tsv .txt".split()}
# A name with one of these endings is a file, though it could be a Hub id by its characters.
_FILE_SUFFIXES = {*_TEXT_SUFFIXES, *".bz2 .gz .parquet .xz .zst".split()}
_BEGINNING = 2**20  # bytes of a text file that are read before it is read as a whole
# What to do with an adapter that is given as a model.
MERGE_ADAPTER = (
    "Merge the adapter into its base with PEFT (merge_and_unload, then save_pretrained), and give that model's folder."
)
_LONGEST_REASON = 400
_BUSY = (408, 429)  # statuses of a Hub that answers later
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_model_name(key: str, name: str) -> None:
    """Check that a name is a saved model: a folder with a config, or an id on the Hub or in its cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return
        if (path / "adapter_config.json").is_file():
            raise RequestError(f"{key} is {name!r}, an adapter of PEFT; expected a whole model. {MERGE_ADAPTER}")
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs:
            raise RequestError(f"{key} is {str(ggufs[0])!r}, {gguf_refusal(ggufs[0])}")
        # A run that was interrupted leaves checkpoints and no model.
        checkpoints = [each.parent.name for each in path.glob("checkpoint-*/config.json")]
        newest = max(checkpoints, key=lambda checkpoint: (len(checkpoint), checkpoint), default=None)
        remedy = f", such as {newest} in it" if newest else ""
        raise RequestError(f"{key} is {name!r}, a folder without config.json; expected that of a saved model{remedy}.")
    elif path.suffix == ".gguf":
        raise RequestError(f"{key} is {name!r}, {gguf_refusal(path)}")
    elif path.exists():
        raise RequestError(f"{key} is {name!r}, a file; expected the folder of a model, or its Hub id.")
    elif not HUB_ID.fullmatch(name):
        raise RequestError(f"{key} is {name!r}, which does not exist; expected the folder of a model, or its Hub id.")
    else:
        check_hub_id(key, name)


def saved_config(name: str) -> dict[str, Any]:
    """Return the config of a model in a folder, as `config.json` has it; empty for a Hub id."""
    path = Path(name, "config.json").expanduser()
    return read_json(path) if path.is_file() else {}


def check_sources(sources: Iterable[tuple[str, str]]) -> None:
    """Check that the models, texts and trees of a recipe exist, as far as possible without reading them."""
    for key, name in sorted(sources, key=lambda source: source[0] != "model_name_or_path"):
        if key == "model_name_or_path":
            check_model_name(key, name)
            continue
        expected = _EXPECTED_SOURCES.get(key, "a file, a folder or a dataset id")
        may_be_id = (
            expected.endswith("id") and HUB_ID.fullmatch(name) and Path(name).suffix.lower() not in _FILE_SUFFIXES
        )
        if not may_be_id and not Path(name).expanduser().exists():
            raise RequestError(f"{key} is {name!r}, which does not exist; expected {expected}.")
        path = Path(name).expanduser()
        if path.suffix.lower() not in _TEXT_SUFFIXES or not path.is_file() or not os.access(path, os.R_OK):
            continue
        with path.open("rb") as file:  # before libraries that would say so are imported for seconds
            beginning = file.read(_BEGINNING)
        if not beginning:
            content = "row" if key == "dataset_name" else "text with a visible character"
            raise RequestError(f"{key} is {name!r}, which is empty: it has no {content}. Add text to it.")
        try:
            codecs.getincrementaldecoder("utf-8")().decode(beginning)
        except UnicodeDecodeError as error:
            raise RequestError(f"{key} is {name!r}, which cannot be read: {error}{save_as_utf8(error)}") from None


def gguf_refusal(file: Path) -> str:
    """Return the end of a message about a GGUF file in place of a model, with what writes it as a model."""
    source = f"{str(file.parent)!r}, gguf_file={file.name!r}, quantization_config=GgufConfig(dequantize=True)"
    return (
        "a GGUF file; expected a folder of safetensors. Write one first, in Python: "
        f"AutoModelForCausalLM.from_pretrained({source}).save_pretrained('base'), and its AutoTokenizer likewise."
    )


def check_hub_id(key: str, name: str, kind: str = "model") -> None:
    """Check by one request that the Hub, or its cache here, has a model or a dataset."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    file, noun, expected = {
        "model": ("config.json", "folder", "the folder of a model, or its Hub id"),
        "dataset": ("README.md", "file or folder", "a file, a folder or a dataset id"),
    }[kind]
    absent = f"{key} is {name!r}, which is no {noun} here"
    try:
        if not isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            with fetching(name):
                snapshot_download(name, allow_patterns=[file], repo_type=kind)
    except GatedRepoError:
        reason = "is gated: accept its terms on the Hub, and log in with 'hf auth login'"
        raise RequestError(f"{key} is {name!r}, which {reason}.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise RequestError(f"{absent} and not on the Hub; expected {expected}.") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = answer_of_hub(error) or f"the Hub cannot be reached (or HF_HUB_OFFLINE is set); expected {expected}"
        raise RequestError(f"{absent}, and {reason}.") from None


def answer_of_hub(error: Exception) -> str | None:
    """Return what the Hub answered and the remedy, as a text; None if the Hub did not answer."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    answer = error if isinstance(error, HfHubHTTPError) else error.__cause__
    if not isinstance(answer, HfHubHTTPError):
        return None
    status = answer.response.status_code
    if isinstance(answer, GatedRepoError):
        remedy = "accept its terms on its page of the Hub, and log in with 'hf auth login' or set HF_TOKEN"
    elif status >= 500 or status in _BUSY:
        remedy = "try again later"
    else:
        remedy = "check the name, and log in with 'hf auth login' to an account that has the right to it"
    reason = textwrap.shorten(str(answer), _LONGEST_REASON, placeholder=" ...")
    return f"the Hub answers with status {status} ({reason}); {remedy}"


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise RequestError(f"dtype is {dtype!r}; expected auto, float32, bfloat16 or float16.")


def usable_device(name: str | None, precision: str = "float32") -> str:
    """Return the device to compute on, tested before a model loads."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device, dtype=getattr(torch, precision)).sum().item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        reason = first_line(error).partition(". ")[0][:120]
        raise RequestError(
            f"device is {device!r}, which cannot be used here ({reason}); expected one of: {available}."
        ) from None
    return device


def short_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each folder or hub id if all differ, else the full names."""
    short = [Path(model).name or model for model in models]
    return short if len(set(short)) == len(short) else list(models)
