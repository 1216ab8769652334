"""Texts as rows of tokens, and what a model reads and loses on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.analysis.watched_models import decoder_of, evaluating
from midus_hf.evaluation.perplexity import DEFAULT_SEQUENCE_LENGTH, automatic_bos

if TYPE_CHECKING:
    from midus_hf.analysis.chapters.records import ChapterRecords


@dataclass(frozen=True)
class TextRows:
    """A text as rows, each a document or a part of one.

    Args:
        name: Of the text.
        rows: Token ids `[T]` of each.
        documents: The number of the document that each is of.
        paths: `[documents, p]`, int64, by which the rows of each document fetch blocks. Default: nothing is fetched.
    """

    name: str
    rows: list[torch.Tensor]
    documents: list[int]
    paths: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))

    def batches(self, batch_size: int) -> list["TextRows"]:
        """The same in parts of so many rows, the last of which may have fewer.

        Raises:
            ValueError: If `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1.")
        parts = [slice(first, first + batch_size) for first in range(0, len(self.rows), batch_size)]
        return [replace(self, rows=self.rows[part], documents=self.documents[part]) for part in parts]

    def fetched_by(self, first: int, count: int) -> torch.Tensor | None:
        """The paths of some rows, `[count, p]`; None where nothing is fetched.

        Args:
            first: The first of them.
            count: How many.
        """
        return None if self.paths is None else self.paths[self.documents[first : first + count]]


@dataclass(frozen=True)
class RowLosses:
    """What a model loses on the rows of a text.

    Args:
        sums: `[R]`, float64, negative log-likelihood of each row, in nats.
        tokens: `[R]`, int64, that are predicted in each: all but its first.
    """

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def mean(self) -> float:
        """Per predicted token."""
        return (self.sums.sum() / self.tokens.sum()).item()

    @classmethod
    def joined(cls, parts: "Sequence[RowLosses]") -> "RowLosses":
        """Those of the parts of a text, as of the text."""
        return cls(torch.cat([part.sums for part in parts]), torch.cat([part.tokens for part in parts]))


def text_rows(
    name: str,
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    longest: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
) -> TextRows:
    """Tokenize documents one by one, cut long ones into rows, and put rows of about one length together.

    A row begins with the tokenizer's BOS token if the tokenizer writes one by itself. Otherwise the order is random, and always
    the same.

    Args:
        name: Of the text.
        documents: Of the text.
        tokenizer: Of the model.
        longest: Tokens that the model was made for. Default: not known.
        sequence_length: Tokens of a row at most. Default: 1024, or `longest` if that is less.
        max_tokens: Choose rows at random that have at most so many tokens together, but one in any case. Default: all.

    Raises:
        ValueError: If an option is out of range, or no document has two tokens.
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
    for row in (numbered[place] for place in order):
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
    records: "ChapterRecords | None" = None,
    progress: Callable[[int], None] | None = None,
) -> RowLosses:
    """Let a model read a text.

    Args:
        model: Put in eval mode for the while.
        text: From `text_rows`.
        batch_size: Rows per forward pass. Default: 4.
        records: Told what each pass reads. Default: none.
        progress: Called with the tokens of each pass. Default: none.

    Raises:
        ValueError: If `batch_size` is less than 1.
        RuntimeError: If the likelihood of the text is not a finite number.
    """
    batches = text.batches(batch_size)
    sums: list[torch.Tensor] = []
    with evaluating(model):
        for batch in batches:
            if records is not None:
                records.begin(text.name, batch.documents)
            sums += _row_sums(model, batch.rows, batch.fetched_by(0, len(batch.rows)))
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
    records: "ChapterRecords | None" = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, RowLosses]:
    """Let a model read texts one after another, and return the losses of each by its name.

    Args:
        model: As for `read_rows`.
        texts: From `text_rows`.
        batch_size: Rows per forward pass. Default: 4.
        records: Told what each pass reads. Default: none.
        progress: Called with the tokens read so far, and of all. Default: none.

    Raises:
        ValueError: As `read_rows`.
        RuntimeError: As `read_rows`.
    """
    told = adding(progress, sum(text.num_tokens for text in texts))
    return {text.name: read_rows(model, text, batch_size=batch_size, records=records, progress=told) for text in texts}


def adding(show: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return what takes how many tokens each pass read, and shows how many were read so far.

    Args:
        show: Called with the tokens that were read, and all. None for nothing.
        total: Tokens that there are to read.
    """
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
    """What a model is called with for a batch of rows, by keyword: without a cache, padded on the right.

    Args:
        model: A causal language model.
        rows: Token ids `[T]` of each.
        paths: `[B, p]`, by which each fetches blocks. Default: nothing is fetched.
    """
    inputs = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = torch.arange(inputs.shape[1], device=model.device) < lengths[:, None]
    given: dict[str, Any] = {"input_ids": inputs, "use_cache": False}
    if not bool(mask.all()):
        given["attention_mask"] = mask.long()
    if "prompt_mask" in getattr(decoder_of(model), "memory_input_names", ()):
        given["prompt_mask"] = mask  # a row is a prompt as a whole
    if paths is not None:
        given["memory_ids"] = paths
    return given


def _row_sums(
    model: PreTrainedModel, rows: Sequence[torch.Tensor], paths: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """The summed loss of each row of a batch."""
    logits = model(**inputs_of(model, rows, paths)).logits
    for row, of_row in zip(rows, logits, strict=True):
        predicted = of_row[: len(row) - 1].to(torch.promote_types(of_row.dtype, torch.float32))
        losses = F.cross_entropy(predicted, row[1:].to(predicted.device), reduction="none")
        yield losses.double().sum().cpu()
