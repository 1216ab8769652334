"""The certificate of a model whose n-gram memory leaves protected texts alone: digests of the texts and what they depend on."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import CERTIFICATE, CONFIG_FILE, SINGLE_FILE, indexed_weights
from midus_hf.files.json_text import read_json
from midus_hf.memories.entries import ATTACHED, TABLES

# Keys of a config that change when a model is only saved again.
OF_SAVING = ("transformers_version", "_name_or_path")


def texts_digest(documents: Sequence[str]) -> str:
    """Return the SHA-256 of documents, in order, each prefixed by its length."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def digests_of(folder: Path, memories: Mapping[str, Any], tokenizer: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the SHA-256 of each memory's table in a saved model, and of the other files that certified texts depend on, by key."""
    of_tables = {name: f"{TABLES}.{name}." for name in memories}
    of_all = [*of_tables.values(), *(f".{ATTACHED}.{name}." for name in memories)]
    config = read_json(folder / CONFIG_FILE)
    kept = json.dumps({key: value for key, value in config.items() if key not in OF_SAVING}, sort_keys=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    makes = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {name: _tensors_digest(folder, [part], True) for name, part in of_tables.items()}, {
        "base_sha256": _tensors_digest(folder, of_all, False),
        "config_sha256": hashlib.sha256(kept.encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(makes.encode()).hexdigest(),
    }


def _tensors_digest(folder: Path, parts: Sequence[str], is_read: bool) -> str:
    """Return the SHA-256 of the tensors whose names contain one of some parts, or none of them."""
    digest = hashlib.sha256()
    for name, tensor in sorted_tensors(folder, lambda name: any(part in name for part in parts) is is_read):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sorted_tensors(folder: Path, is_read: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a saved model whose names a function accepts, in the order of names."""
    shards = [SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else sorted(indexed_weights(folder))
    with contextlib.ExitStack() as opened:
        file_of: dict[str, Any] = {}
        for shard in shards:
            file = opened.enter_context(safe_open(folder / shard, "pt"))
            file_of |= dict.fromkeys(filter(is_read, file.keys()), file)
        for name in sorted(file_of):
            yield name, file_of[name].get_tensor(name)


_CERTIFIED = {
    "base_sha256": "a tensor outside the memory",
    "config_sha256": "the config",
    "tokenizer_sha256": "the tokenizer",
}


def read_certificate(folder: Path) -> dict[str, Any] | None:
    """Return the certificate in the folder of a model, or None if there is none."""
    path = folder / CERTIFICATE
    if not path.is_file():
        return None
    try:
        certificate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [certificate[key] for key in ("texts", *_CERTIFIED)]
        _ = [entry["table_sha256"] for entry in certificate["memories"].values()]
    except (ValueError, AttributeError, TypeError, KeyError):
        raise RequestError(
            f"{path} is not a certificate of midus train; remove it, or train with protect again."
        ) from None
    return certificate


def check_certificate(certificate: Mapping[str, Any], folder: Path, tokenizer: Any) -> None:
    """Refuse a certificate if the table, other tensors, the config or the tokenizer differ from what was certified."""
    memories = certificate["memories"]
    tables, beside = digests_of(folder, memories, tokenizer)
    differs = [f"the table of memory {name!r}" for name in memories if tables[name] != memories[name]["table_sha256"]]
    differs += [what for key, what in _CERTIFIED.items() if certificate[key] != beside[key]]
    if differs:
        raise RequestError(
            f"{folder / CERTIFICATE} does not fit the folder: {', '.join(differs)} changed since; expected what was certified. "
            "Remove the certificate, or train with protect again."
        )
