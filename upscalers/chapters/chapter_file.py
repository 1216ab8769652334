"""Files of chapters: rows of the bank, router weights and biases of each layer, and the sizes that the chapters fit."""

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.files.json_text import parse_json
from upscalers.chapters.banks import STORED_INTEGERS, Bank, ChapterMemory, row_names
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor, read_header, read_metadata
from upscalers.request.errors import RequestError

METADATA_KEY = "midus_chapters"
# Metadata key of the SHA-256 of the whole file, which is computed with zeros in place of the digest itself.
DIGEST_KEY = "midus_chapters_sha256"

_NO_DIGEST = "0" * 64
_DIGEST_PLACE = f'"{DIGEST_KEY}":"'.encode()
_AT_ONCE = 2**24
_ROWS_AT_ONCE = 2**14


def router_weight(layer: int) -> str:
    """Return the name of the tensor with a layer's router weights."""
    return f"layers.{layer}.router_weight"


def router_bias(layer: int) -> str:
    """Return the name of the tensor with a layer's router biases."""
    return f"layers.{layer}.router_bias"


@dataclass(frozen=True)
class ChapterFile:
    """A file of chapters that `export` wrote.

    Args:
        path: Path of the file.
        tensors: Tensors of the file, by name.
        chapters: Numbers that the chapters had in the model.
        chapter_tokens: T, rows per chapter.
        layers: Indices of the layers that read the chapters' bank in the model.
        bank_rank: Option `bank_rank` of the memory in the model.
        bank_bits: Option `bank_bits` of the memory in the model.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    chapters: tuple[int, ...]
    chapter_tokens: int
    layers: tuple[int, ...]
    bank_rank: int | None
    bank_bits: int | None

    def sources(self) -> dict[str, StoredTensor]:
        """Return the tensors, by names that no tensor of a model has."""
        return {self._source(name): tensor for name, tensor in self.tensors.items()}

    def bank(self) -> Bank:
        """Return the names that `sources` gives to the tensors, as a bank."""
        return Bank(
            0,
            self.layers,
            tuple(map(self._source, row_names(self.bank_bits))),
            tuple(self._source(router_weight(layer)) for layer in self.layers),
            tuple(self._source(router_bias(layer)) for layer in self.layers),
        )

    def check_fits(self, memory: ChapterMemory, bank: Bank) -> None:
        """Check that the chapters have the sizes of a bank.

        Raises:
            RequestError: If a size differs.
        """
        sizes = {
            "rows per chapter": (self.chapter_tokens, memory.options.chapter_tokens),
            "bank_rank": (self.bank_rank, memory.options.bank_rank),
            "bank_bits": (self.bank_bits, memory.options.bank_bits),
            "columns of the bank": (
                self.tensors[row_names(self.bank_bits)[0]].shape[1],
                memory.model.tensors[bank.rows[0]].shape[1],
            ),
            "layers": (len(self.layers), len(bank.layers)),
            "hidden_size": (
                self.tensors[router_weight(self.layers[0])].shape[1],
                memory.model.tensors[bank.router_weights[0]].shape[1],
            ),
        }
        for what, (actual, expected) in sizes.items():
            if actual != expected:
                raise RequestError(
                    f"{self.path.name} has {what} = {json.dumps(actual)}; expected {json.dumps(expected)}, as bank {bank.number} of "
                    f"memory {memory.name!r} has. Export from a model of the same sizes."
                )

    def _source(self, name: str) -> str:
        return f"{self.path.name}: {name}"


def metadata(memory: ChapterMemory, bank: Bank, chapters: tuple[int, ...], source: str) -> dict[str, str]:
    """Return the metadata of a file with chapters of a bank, with zeros as the digest; `source` names the model in records."""
    description = {
        "chapters": list(chapters),
        "chapter_tokens": memory.options.chapter_tokens,
        "layers": list(bank.layers),
        "bank": bank.number,
        "memory": memory.entry.to_dict(),
        "hidden_size": memory.model.config["hidden_size"],
        "model_type": memory.model.config["model_type"],
        "source": source,
        "midus_hf": importlib.metadata.version("midus-hf"),
    }
    return {METADATA_KEY: json.dumps(description), DIGEST_KEY: _NO_DIGEST}


def seal(path: Path) -> None:
    """Write the digest of a file into its metadata, over the zeros that `metadata` put there."""
    digest, position = _digest(path)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(digest.encode())


def _digest(path: Path) -> tuple[str, int]:
    """Return the digest that a file should contain, and the position in the file of the digest that it does contain."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        position = header.index(_DIGEST_PLACE) + len(_DIGEST_PLACE)
        digest = hashlib.sha256(
            length + header[:position] + _NO_DIGEST.encode() + header[position + len(_NO_DIGEST) :]
        )
        while block := file.read(_AT_ONCE):
            digest.update(block)
    return digest.hexdigest(), len(length) + position


def is_chapter_file(path: Path) -> bool:
    """Return whether `export` wrote a file."""
    try:
        return METADATA_KEY in read_metadata(path)
    except (OSError, RequestError):
        return False


def open_chapter_file(path: Path) -> ChapterFile:
    """Open a file of chapters.

    Raises:
        RequestError: If the file does not exist, or is no sound file that `export` wrote.
    """
    if not path.is_file():
        raise RequestError(f"{path} is no file; expected one that 'midus edit export' wrote.")
    tensors, text = read_header(path), read_metadata(path).get(METADATA_KEY)
    if text is None:
        raise RequestError(f"{path.name} holds no chapters; expected a file that 'midus edit export' wrote.")
    try:
        description: dict[str, Any] = parse_json(text)
        chapters, layers = tuple(description["chapters"]), tuple(description["layers"])
        of_bank = (description["memory"].get(name) for name in ("bank_rank", "bank_bits"))
        file = ChapterFile(path, tensors, chapters, description["chapter_tokens"], layers, *of_bank)
        sound = _is_sound(file)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        sound = False
    if not sound:
        raise RequestError(
            f"{path.name} has a description that does not fit its tensors; expected a sound file. Export it again."
        )
    _check_contents(file, read_metadata(path).get(DIGEST_KEY))
    return file


def _check_contents(file: ChapterFile, recorded: str | None) -> None:
    """Refuse a file that differs from its recorded digest, or that has a number which is not finite."""
    try:
        digest = None if recorded is None else _digest(file.path)[0]
    except ValueError:  # its header has the digest, but not as `export` writes it
        digest = None
    if digest is None or digest != recorded:
        problem = "has no digest" if recorded is None else "is not what was exported: its digest differs"
        raise RequestError(
            f"{file.path.name} {problem}; expected a file as 'midus edit export' writes it. Export it again."
        )
    import torch
    from safetensors import safe_open

    with safe_open(file.path, "pt") as opened:
        for name, tensor in file.tensors.items():
            rows = opened.get_tensor(name)
            if rows.is_floating_point() and not all(torch.isfinite(part).all() for part in rows.split(_ROWS_AT_ONCE)):
                raise RequestError(
                    f"{file.path.name} has numbers in {name} that are not finite ({tensor.dtype}); expected finite ones alone, since "
                    "a model that reads others computes nothing finite. Export chapters of a model that was trained without fault."
                )


def _is_sound(file: ChapterFile) -> bool:
    """Return whether the tensors of a file are as its metadata describes them."""
    count = len(file.chapters)
    hidden_size = file.tensors[router_weight(file.layers[0])].shape[1]
    expected: dict[str, tuple[int, ...]] = {
        name: (count * file.chapter_tokens, *file.tensors[name].shape[1:]) for name in row_names(file.bank_bits)
    }
    for layer in file.layers:
        expected |= {router_weight(layer): (count, hidden_size), router_bias(layer): (count,)}
    return (
        count > 0
        and all(type(number) is int and number >= 0 for number in (*file.chapters, *file.layers, file.chapter_tokens))
        and len(set(file.chapters)) == count
        and {name: tensor.shape for name, tensor in file.tensors.items()} == expected
        and all(
            tensor.dtype == STORED_INTEGERS.get(file.bank_bits or 0)
            if name == "bank_integers"
            else tensor.dtype in TORCH_NAMES
            for name, tensor in file.tensors.items()
        )
    )
