"""Texts as rows of tokens, a model's losses on the rows, and the effect of a change of the model on its losses."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.evaluation.perplexity import DEFAULT_SEQUENCE_LENGTH, automatic_bos
from midus_hf.look.page import with_error
from midus_hf.look.watched_models import decoder_of, evaluating


@dataclass(frozen=True)
class TextRows:
    """A text as rows of tokens. Each row is a document or a part of a document.

    Args:
        name: Name of the text.
        rows: Token ids of each row, `[T]`.
        documents: Number of the document that each row belongs to.
        paths: Path by which the rows of each document fetch blocks, `[documents, p]`, int64. Default: nothing is fetched.
    """

    name: str
    rows: list[torch.Tensor]
    documents: list[int]
    paths: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all rows together."""
        return sum(map(len, self.rows))

    def batches(self, batch_size: int) -> list["TextRows"]:
        """Return the text in batches of `batch_size` rows; the last batch may have fewer rows.

        Raises:
            ValueError: If `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1.")
        parts = [slice(first, first + batch_size) for first in range(0, len(self.rows), batch_size)]
        return [replace(self, rows=self.rows[part], documents=self.documents[part]) for part in parts]

    @property
    def row_paths(self) -> torch.Tensor | None:
        """Path by which each row fetches blocks, `[R, p]`; None if nothing is fetched."""
        return None if self.paths is None else self.paths[self.documents]


@dataclass(frozen=True)
class RowLosses:
    """Losses of a model on the rows of a text.

    Args:
        sums: Negative log-likelihood of each row, `[R]`, float64, in nats.
        tokens: Number of predicted tokens in each row, `[R]`, int64: all tokens but the first.
    """

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def mean(self) -> float:
        """Loss per predicted token, in nats."""
        return (self.sums.sum() / self.tokens.sum()).item()

    @classmethod
    def joined(cls, parts: "Sequence[RowLosses]") -> "RowLosses":
        """Return the losses on a text from the losses on its parts."""
        return cls(torch.cat([part.sums for part in parts]), torch.cat([part.tokens for part in parts]))


@dataclass(frozen=True)
class Effect:
    """Effect of an intervention on the loss of a text.

    Args:
        difference: Loss with the intervention minus loss without it, in nats per predicted token.
        standard_error: Standard error of the difference, from its variation over rows. None for one row.
    """

    difference: float
    standard_error: float | None

    @property
    def words(self) -> str:
        """Difference and standard error as text for a table."""
        return with_error(f"{self.difference:+.5f}", self.standard_error)


def effect_between(usual: RowLosses, changed: RowLosses) -> Effect:
    """Return the loss per token of the changed model minus that of the unchanged model on the same rows, with its error."""
    return Effect(*ratio_with_error(changed.sums - usual.sums, usual.tokens))


def ratio_with_error(sums: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float | None]:
    """Return a mean per token and its standard error, or None instead of the error for one row.

    The error is the standard error of a ratio of sums over rows that were drawn at random.

    Args:
        sums: Sum over the tokens of each row, `[R]`, float64.
        tokens: Number of tokens of each row, `[R]`.
    """
    counts = tokens.double()
    mean = (sums.sum() / counts.sum()).item()
    rows = len(counts)
    if rows < 2:
        return mean, None
    scatter = (sums - mean * counts).square().sum().item()
    return mean, math.sqrt(scatter * rows / (rows - 1)) / counts.sum().item()


def text_rows(
    name: str,
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    longest: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
) -> TextRows:
    """Tokenize documents one by one, and cut long documents into rows. Rows are sorted by length, the longest first.

    A row begins with the tokenizer's BOS token if the tokenizer writes one by itself. Rows of equal length are in a random
    order, which is the same on every run.

    Args:
        name: Name of the text.
        documents: Documents of the text.
        tokenizer: The model's tokenizer.
        longest: Longest input that the model was made for, in tokens. Default: not known.
        sequence_length: Greatest number of tokens per row. Default: 1024, or `longest` if that is less.
        max_tokens: Greatest number of tokens in all rows together. Rows are chosen at random, and one row is always kept.
            Default: all rows.

    Raises:
        ValueError: If an option is out of range, or if no row has two tokens.
    """
    if sequence_length is None:
        sequence_length = min(DEFAULT_SEQUENCE_LENGTH, longest or DEFAULT_SEQUENCE_LENGTH)
    if sequence_length < 2:
        raise ValueError(f"sequence_length is {sequence_length}; expected at least 2.")
    if longest is not None and sequence_length > longest:
        raise ValueError(f"sequence_length is {sequence_length}; the model was made for at most {longest} tokens.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1.")
    bos = automatic_bos(tokenizer)
    lead = [] if bos is None else [bos]
    own = sequence_length - len(lead)
    numbered = [
        (number, torch.tensor([*lead, *ids[first : first + own]]))
        for number, document in enumerate(documents)
        for ids in [tokenizer(document, add_special_tokens=False, verbose=False).input_ids]
        for first in range(0, len(ids), own)
    ]
    numbered = [row for row in numbered if len(row[1]) >= 2]
    if not numbered:
        raise ValueError(f"text {name!r} has no document of two tokens; expected one to predict. Give more text.")
    order = torch.randperm(len(numbered), generator=torch.Generator().manual_seed(0)).tolist()
    chosen: list[tuple[int, torch.Tensor]] = []
    left = max_tokens
    for row in (numbered[index] for index in order):
        if left is not None and chosen and len(row[1]) > left:
            break
        chosen.append(row)
        left = None if left is None else left - len(row[1])
    chosen.sort(key=lambda row: -len(row[1]))
    return TextRows(name, [ids for _, ids in chosen], [number for number, _ in chosen])


def read_rows(
    model: PreTrainedModel,
    text: TextRows,
    *,
    batch_size: int = 4,
    progress: Callable[[int], None] | None = None,
) -> RowLosses:
    """Let a model read a text, and return its losses.

    Args:
        model: A causal language model. It is in eval mode while it reads.
        text: The text, as `text_rows` returns it.
        batch_size: Rows per forward pass. Default: 4.
        progress: Called with the number of tokens of each pass. Default: none.

    Raises:
        ValueError: If `batch_size` is less than 1.
        RuntimeError: If the loss of a row is not finite.
    """
    batches = text.batches(batch_size)
    sums: list[torch.Tensor] = []
    with evaluating(model):
        for batch in batches:
            sums += _row_sums(model, batch.rows, batch.row_paths)
            if progress is not None:
                progress(batch.num_tokens)
    losses = RowLosses(torch.stack(sums), torch.tensor([len(row) - 1 for row in text.rows]))
    if not losses.sums.isfinite().all():
        raise RuntimeError(f"the loss of text {text.name!r} is not a finite number. The model's weights are broken.")
    return losses


def read_texts(
    model: PreTrainedModel,
    texts: Sequence[TextRows],
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, RowLosses]:
    """Let a model read texts one after another, and return the losses of each text, by the text's name.

    Arguments and errors are as in `read_rows`, but `progress` is called with the number of tokens read so far and the total.
    """
    advance = adding(progress, sum(text.num_tokens for text in texts))
    return {text.name: read_rows(model, text, batch_size=batch_size, progress=advance) for text in texts}


def adding(show: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the tokens of each pass, and calls `show` with the tokens read so far and the `total`."""
    done = 0

    def add(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if show is not None:
            show(done, total)

    return add


def inputs_of(
    model: PreTrainedModel, rows: Sequence[torch.Tensor], paths: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return keyword arguments for a forward pass over a batch of rows, padded on the right, without a cache.

    Args:
        model: A causal language model.
        rows: Token ids of each row, `[T]`.
        paths: Path by which each row fetches blocks, `[B, p]`. Default: nothing is fetched.
    """
    inputs = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = torch.arange(inputs.shape[1], device=model.device) < lengths[:, None]
    kwargs: dict[str, Any] = {"input_ids": inputs, "use_cache": False}
    if not bool(mask.all()):
        kwargs["attention_mask"] = mask.long()
    if "prompt_mask" in getattr(decoder_of(model), "memory_input_names", ()):
        kwargs["prompt_mask"] = mask  # the whole row is the prompt
    if paths is not None:
        kwargs["memory_ids"] = paths
    return kwargs


def _row_sums(
    model: PreTrainedModel, rows: Sequence[torch.Tensor], paths: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yield the summed loss of each row of a batch."""
    logits = model(**inputs_of(model, rows, paths)).logits
    for row, of_row in zip(rows, logits, strict=True):
        predicted = of_row[: len(row) - 1].to(torch.promote_types(of_row.dtype, torch.float32))
        losses = F.cross_entropy(predicted, row[1:].to(predicted.device), reduction="none")
        yield losses.double().sum().cpu()
