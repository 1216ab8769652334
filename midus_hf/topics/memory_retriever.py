"""The retriever: embeds texts by a sentence-transformers model, and finds their paths in a tree."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel
from transformers.utils.hub import cached_file

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.files.checkpoint_files import CONFIG, WEIGHTS, read_json, refuse_lfs_pointers
from midus_hf.models.saved_models import check_no_missing_tensors
from midus_hf.sources.downloads import fetching
from midus_hf.sources.names import usable_device
from midus_hf.sources.tokenizers import load_tokenizer
from midus_hf.topics.tree import RECORD_FILE, ClusterTree, folder_of_tree

# Number of the generic memory at every level of a path.
_GENERIC = -1
_MODULES = ("Transformer", "Pooling", "Normalize")
# Prefix of the names of tensors that hidden states do not depend on, and that many checkpoints lack.
_UNUSED = "pooler."


class TextEmbedder:
    """Embedder of texts: the L2-normalised mean of a model's last hidden states over tokens; `width` is c.

    Args:
        model: Folder or hub id of an encoder in the style of sentence-transformers, such as all-MiniLM-L6-v2.
        device: Device of the model.
        batch_size: Texts per forward pass.
        max_tokens: Tokens of a text that are read, including special tokens; the rest is cut off. Default: the limit in the model's
            `sentence_bert_config.json`, or else its number of positions.

    Raises:
        RequestError: If the model cannot be loaded, lacks tensors, pools in another way or transforms vectors further, or if a number
            is out of range.
    """

    def __init__(self, model: str, device: str = "cpu", batch_size: int = 64, max_tokens: int | None = None):
        if batch_size < 1:
            raise RequestError(f"batch_size is {batch_size}; expected at least 1 text.")
        self.name = str(model)
        self.batch_size = batch_size
        _check_modules(self.name)
        with as_request_error(
            f"embedding model is {self.name!r}, which cannot be loaded", OSError, ValueError, KeyError
        ):
            self.tokenizer = load_tokenizer(self.name)
            refuse_lfs_pointers(Path(self.name), CONFIG, WEIGHTS)
            with fetching(self.name):
                loaded: Any = AutoModel.from_pretrained(
                    self.name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
                )
        self.model, loading = loaded
        missing = sorted(name for name in loading["missing_keys"] if not name.startswith(_UNUSED))
        check_no_missing_tensors(self.name, missing, "embedding model")
        self.device = torch.device(usable_device(device))
        self.model.eval().to(self.device)
        self.width: int = self.model.config.hidden_size
        self.max_tokens = self._check_max_tokens(max_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the used weights and the vocabulary, 64 hexadecimal digits."""
        digest = hashlib.sha256(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            if not name.startswith(_UNUSED):
                digest.update(f"{name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def embed(self, texts: Sequence[str], progress: Callable[[int], object] | None = None) -> torch.Tensor:
        """Embed N texts: `[N, c]`, float32, on the CPU, with rows of length 1.

        Texts of similar lengths share a batch, which changes a row only by rounding, about 1e-7. `progress` is called with the number
        of texts of each finished batch.
        """
        rows = torch.empty(len(texts), self.width)
        if not len(texts):
            return rows
        encoded = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        # The longest texts come first, so that a lack of memory is noticed at once.
        order = sorted(range(len(texts)), key=lambda index: -len(encoded[index]))
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            padded = self.tokenizer.pad({"input_ids": [encoded[index] for index in batch]}, return_tensors="pt")
            inputs = {name: tensor.to(self.device) for name, tensor in padded.items()}
            hidden = self.model(**inputs).last_hidden_state  # [B, T, c]
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            rows[batch] = torch.nn.functional.normalize(pooled, dim=-1).cpu()
            if progress is not None:
                progress(len(batch))
        return rows

    def _check_max_tokens(self, max_tokens: int | None) -> int:
        positions = getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        if max_tokens is None:
            settings = _read_json(self.name, "sentence_bert_config.json") or {}
            return min(settings.get("max_seq_length") or positions, positions)
        least = self.tokenizer.num_special_tokens_to_add() + 1
        if not least <= max_tokens <= positions:
            raise RequestError(
                f"max_tokens is {max_tokens}; expected a number from {least} to {positions}, the model's positions."
            )
        return max_tokens


def _check_modules(name: str) -> None:
    """Raise an error if the model's files name other steps than mean pooling and normalisation."""
    kinds = {str(module.get("type", "")).rpartition(".")[2] for module in _read_json(name, "modules.json") or []}
    pooling = _read_json(name, "1_Pooling/config.json") or {}
    modes = {key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True and "_mode_" in key}
    modes |= {mode for mode in [pooling.get("pooling_mode")] if isinstance(mode, str)}
    if others := sorted(kinds - {*_MODULES}) + sorted(modes - {"mean_tokens", "mean"}):
        raise RequestError(
            f"embedding model is {name!r}, whose files name {', '.join(others)}; expected {', '.join(_MODULES)} only, with the "
            "mean of tokens. Choose such a model."
        )


def _read_json(name: str, path: str) -> Any:
    """Read a JSON file of a model from its folder or the hub; return None if there is no file."""
    absent = ("gated_repo", "missing_entries", "connection_errors")
    quiet: dict[str, Any] = {f"_raise_exceptions_for_{each}": False for each in absent}
    try:
        file = cached_file(name, path, **quiet)
    except OSError:  # the model does not exist; loading it will raise an error that says so
        return None
    if file is None:
        return None
    return read_json(Path(file))


class MemoryRetriever:
    """Retriever that finds the path of a text in a tree of topics.

    A text without a topic (`ClusterTree.has_topic`) gets the path of the generic memory, -1 at each level, whose blocks were trained
    by texts of all topics.

    Args:
        embedder: Embedder with the model that the tree was built with.

    Raises:
        RequestError: If the embedder is another model.
    """

    def __init__(self, tree: ClusterTree, embedder: TextEmbedder):
        expected = tree.origin.embedding_fingerprint
        if expected is not None and embedder.fingerprint != expected:
            raise RequestError(
                f"embedding model {embedder.name!r} has the fingerprint {embedder.fingerprint[:16]}...; expected "
                f"{expected[:16]}..., the fingerprint of {tree.origin.embedding_model!r}, with which the tree was built. Use that "
                "model, or build the tree again."
            )
        self.tree = tree
        self.embedder = embedder

    def paths(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the paths of texts' first `embedder.max_tokens` tokens, `[N, p]`, int64; -1 without a topic."""
        paths = paths_near_topics(self.tree, self.embedder.embed(texts))
        is_blank = torch.tensor([not text.strip() for text in texts], dtype=torch.bool)
        return paths.masked_fill(is_blank[:, None], _GENERIC)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", batch_size: int = 64) -> "MemoryRetriever":
        """Load a tree and its embedding model.

        Args:
            folder: Folder that `midus cluster build` wrote, or a model's folder with the tree that its bank was trained with.
            device: Device of the embedding model.
            batch_size: Texts per forward pass.

        Raises:
            RequestError: If the tree or the model cannot be loaded, they do not fit each other, or the tree names no model.
        """
        tree = ClusterTree.load(folder)
        name = tree.origin.embedding_model
        record = folder_of_tree(Path(folder).expanduser()) / RECORD_FILE
        if name is None:
            raise RequestError(
                f"tree {str(folder)!r} does not say which model embeds its texts; expected a name. Write the model's folder or hub "
                f"id as embedding_model in {record}."
            )
        if Path(name).is_absolute() and not Path(name).exists():
            raise RequestError(
                f"tree {str(folder)!r} was built with the embedding model {name!r}, which is not there; expected its folder. If it "
                f"has moved, write its new path as embedding_model in {record}."
            )
        return cls(tree, TextEmbedder(name, device, batch_size, tree.origin.embedding_max_tokens))


def paths_near_topics(tree: ClusterTree, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the paths of embeddings, `[N, p]`, with -1 where there is no topic."""
    paths = tree.paths(embeddings)
    return paths.masked_fill(~tree.has_topic(embeddings, paths)[:, None], _GENERIC)
