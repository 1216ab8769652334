"""Texts as rows of tokens, and a model's losses on the rows."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.sources.progress import show_progress
from midus_hf.sources.tokenizers import check_ids, prefix_ids

DEFAULT_SEQUENCE_LENGTH = 1024
DOCUMENT_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class TextRows:
    """A text as rows of tokens: a model reads all tokens except the last, and predicts all after the lead.

    Args:
        name: Name of the text.
        rows: Token ids of each row, `[T]`, two or more.
        documents: Number of the document of each row.
        paths: Path by which the rows of each document fetch blocks, `[documents, p]`, int64. Default: nothing is fetched.
        lead: Number of tokens at the beginning of each row that are not predicted, 1 or more. Default: 1.
        num_bytes: UTF-8 bytes of the text that each row predicts. Default: none, they are not known.
        tokens_sha256: SHA-256 of the ids of the whole text, also of tokens that no row has. Default: empty, not known.
    """

    name: str
    rows: list[torch.Tensor]
    documents: list[int]
    paths: torch.Tensor | None = None
    lead: int = 1
    num_bytes: list[int] = field(default_factory=list)
    tokens_sha256: str = ""

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens that are predicted in each row, `[R]`, int64."""
        return torch.tensor([len(row) - self.lead for row in self.rows])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are predicted, in all rows together."""
        return int(self.lengths.sum())

    def batches(self, batch_size: int) -> list["TextRows"]:
        """Return the text in batches of `batch_size` rows, 1 or more; the last batch may have fewer rows."""
        if batch_size < 1:
            raise RequestError(f"batch_size is {batch_size}; expected 1 or more rows.")
        parts = [slice(first, first + batch_size) for first in range(0, len(self.rows), batch_size)]
        return [
            replace(self, rows=self.rows[part], documents=self.documents[part], num_bytes=self.num_bytes[part])
            for part in parts
        ]

    def inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return keyword arguments for a forward pass over all rows, padded on the right, without a cache."""
        read = [row[:-1] for row in self.rows]
        ids = torch.nn.utils.rnn.pad_sequence(read, batch_first=True).to(model.device)
        lengths = torch.tensor([len(row) for row in read], device=model.device)
        mask = torch.arange(ids.shape[1], device=model.device) < lengths[:, None]
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if not bool(mask.all()):
            kwargs["attention_mask"] = mask.long()
        if self.paths is not None:
            kwargs["memory_ids"] = self.paths[self.documents]
        return kwargs

    def targets(self) -> torch.Tensor:
        """Return the token that each position predicts, `[R, T - 1]`, int64; -100 for none."""
        behind = [row[1:].index_fill(0, torch.arange(self.lead - 1), IGNORED_LABEL) for row in self.rows]
        return torch.nn.utils.rnn.pad_sequence(behind, batch_first=True, padding_value=IGNORED_LABEL)


@dataclass(frozen=True)
class RowLosses:
    """Losses of a model on the rows of a text.

    Args:
        sums: Negative log-likelihood of each row, `[R]`, float64, in nats.
        tokens: Number of predicted tokens in each row, `[R]`, int64.
    """

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def mean(self) -> float:
        """Loss per predicted token, in nats."""
        return (self.sums.sum() / self.tokens.sum()).item()

    @property
    def perplexity(self) -> float:
        """`exp` of the loss per predicted token. Comparable between models of one tokenizer."""
        return math.exp(self.mean)


def text_rows(
    name: str,
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    joined: bool = False,
) -> TextRows:
    """Tokenize documents without special tokens, and cut them into rows that predict every token once.

    If the tokenizer puts tokens before a text (`prefix_ids`: BOS of Llama and Gemma), each row begins with them. If it does not
    (Qwen, SmolLM), a row begins with the last token of the row before, and the first token of a document is not predicted. Long rows
    come first.

    Args:
        name: Name of the text.
        documents: Documents of the text.
        tokenizer: Tokenizer of the models that will read the rows.
        config: Config of these models.
        sequence_length: Tokens predicted per row; the last row of a document has fewer. Default: 1024, or the model's length if
            shorter.
        max_tokens: Largest number of tokens to predict, in rows evenly spread over the text, at least one row. Default: all.
        joined: Whether documents are concatenated, with a blank line between them, into one document. Default: False.

    Raises:
        RequestError: If an option is out of range, or if the text is too short.
    """
    beginning = torch.tensor(prefix_ids(tokenizer), dtype=torch.int64)
    lead = max(1, len(beginning))
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = None if limit is None else limit - (lead - 1)
    if sequence_length is None:
        sequence_length = min(DEFAULT_SEQUENCE_LENGTH, limit or DEFAULT_SEQUENCE_LENGTH)
    for option, value in (("sequence_length", sequence_length), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise RequestError(f"{option} is {value}; expected at least 1.")
    if limit is not None and sequence_length > limit:
        raise RequestError(f"sequence_length is {sequence_length}; the model was made for at most {limit} tokens.")
    rows: list[tuple[torch.Tensor, int, int | None]] = []
    digest = hashlib.sha256()
    for number, parts in enumerate([list(documents)] if joined else [[document] for document in documents]):
        ids, ends = _tokenize(tokenizer, parts)
        digest.update(ids.numpy().data)
        for first in range(0 if len(beginning) else 1, len(ids), sequence_length):
            targets = ids[first : first + sequence_length]
            before = beginning if len(beginning) else ids[first - 1 : first]
            size = None if ends is None else ends[first + len(targets) - 1] - (ends[first - 1] if first else 0)
            rows.append((torch.cat([before, targets]), number, size))
    predicted = sum(len(row[0]) - lead for row in rows)
    if predicted < 1:
        raise RequestError(f"text {name!r} has {predicted} tokens to predict; expected at least 1. Give more text.")
    if max_tokens is not None:
        for kept in range(min(len(rows), max(1, max_tokens * len(rows) // predicted)), 0, -1):
            spread = [rows[index * len(rows) // kept] for index in range(kept)]
            if kept == 1 or sum(len(row[0]) - lead for row in spread) <= max_tokens:
                rows = spread
                break
    rows.sort(key=lambda row: -len(row[0]))
    ids_of_rows, numbers, sizes = (list(column) for column in zip(*rows, strict=True))
    known = [] if None in sizes else sizes
    return TextRows(name, ids_of_rows, numbers, None, lead, known, digest.hexdigest())


def _tokenize(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> tuple[torch.Tensor, list[int] | None]:
    """Return the tokens of joined documents, `[T]`, int64, and their ends in bytes (None if not fast)."""
    texts = [*(document + DOCUMENT_SEPARATOR for document in documents[:-1]), *documents[-1:]]
    ids: list[int] = []
    ends: list[int] = []
    before = 0
    for text in texts:
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
        ids += read["input_ids"]
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        bytes_up_to = np.append(0, np.cumsum(1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)))
        if tokenizer.is_fast:
            ends += (before + bytes_up_to[[end for _, end in read["offset_mapping"]]]).tolist()
        before += int(bytes_up_to[-1])
    return torch.tensor(ids, dtype=torch.int64), ends if tokenizer.is_fast else None


@contextlib.contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model in eval mode within the context, without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def row_losses(model: PreTrainedModel, text: TextRows, *, batch_size: int = 4) -> RowLosses:
    """Return the losses of a model on a text, computed in float32 or wider and summed in float64.

    Args:
        model: A causal language model. It is in eval mode while it reads.
        text: The text, as `text_rows` returns it.
        batch_size: Rows per forward pass. It changes only speed, memory, and the last bits of floats. Default: 4.

    Raises:
        RequestError: If `batch_size` is less than 1, or if the text has an id that the model does not embed.
        RuntimeError: If the loss of a row is not finite.
    """
    batches = text.batches(batch_size)
    check_ids(int(max(row.max() for row in text.rows)), model.config.get_text_config().vocab_size)
    sums: list[torch.Tensor] = []
    with evaluating(model):
        for batch in show_progress(batches, desc=f"reading {text.name}", unit=" batches", leave=False):
            sums.append(row_sums(model(**batch.inputs(model)).logits, batch.targets()).cpu())
    losses = RowLosses(torch.cat(sums), text.lengths)
    if not losses.sums.isfinite().all():
        raise RuntimeError(f"the loss of text {text.name!r} is not a finite number. The model's weights are broken.")
    return losses


def row_sums(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of each row, `[B]`, float64, in nats, computed in float32 or wider.

    Args:
        logits: Logits of a model, `[B, T, V]`.
        targets: The token that each position predicts, `[B, T]`, int64; -100 for none.
    """
    sums = []
    for predicted, target in zip(logits, targets.to(logits.device), strict=True):
        learned = target != IGNORED_LABEL
        wide = predicted[learned].to(torch.promote_types(predicted.dtype, torch.float32))
        sums.append(F.cross_entropy(wide, target[learned], reduction="none").double().sum())
    return torch.stack(sums)
