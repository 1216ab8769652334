"""Texts packed into sequences of one length, as Trainers read them.

Every text is tokenised with its tokenizer's default settings and ends in EOS, and all texts are laid end to end. The
row of tokens is cut every `sequence_length` tokens. The remainder at the end is a shorter sequence if it is more than 1 % of the
tokens, and otherwise dropped, as is usual in continual pretraining. `datasets` keeps the results in its cache.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Label of tokens that losses of transformers leave out.
IGNORED_LABEL = -100

# To be changed with whatever changes the sequences of a text, so that sequences in the cache are not taken for new ones.
_PROCEDURE = "3"
_TEXTS_A_BATCH = 1000
# A remainder of no more than this share of the tokens is dropped.
_DROPPED_SHARE = 0.01


class PackedTexts(NamedTuple):
    """Texts as sequences.

    Args:
        sequences: Rows with `input_ids`, and `labels`, `position_ids` and `memory_ids` where they are needed.
        tokens: Number of tokens of the texts.
        dropped: Number of tokens that are in no sequence.
        is_short: Whether the end of a text, or of a leaf, is a sequence that is filled up.
    """

    sequences: "Dataset"
    tokens: int
    dropped: int
    is_short: bool

    def phrase(self, sequence_length: int) -> str:
        """Return a phrase about what is read of the texts, and why the rest is not."""
        number = len(self.sequences)
        short = ", the last filled up" if self.is_short else ""
        dropped = f"; the last {self.dropped:,} fill no sequence and are dropped" if self.dropped else ""
        return (
            f"{self.tokens - self.dropped:,} of {self.tokens:,} tokens are read, in {number:,} sequence{'s' * (number != 1)} of "
            f"{sequence_length:,}{short}{dropped}"
        )


def packed_sequences(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    *,
    documents_apart: bool,
    key: str = "corpus",
    text_column: str = "text",
    vocab_size: int | None = None,
) -> PackedTexts:
    """Return the texts of a dataset as sequences of tokens.

    Args:
        dataset: Rows of text, as from `read_corpus`.
        tokenizer: A tokenizer with an EOS token; it adds its default special tokens.
        sequence_length: T, tokens per sequence.
        documents_apart: Whether tokens attend only within their text: positions then restart where a text begins.
        key: Key of the arguments that names the texts, for messages. Default: `"corpus"`.
        text_column: Column that holds the text. Default: `"text"`.
        vocab_size: Number of ids that the model embeds. Default: None, unchecked.

    Returns:
        Rows with `input_ids` `[T]`. With `documents_apart` also `position_ids` `[T]` and `labels` `[T]`, in which the
        first token of each text is no label, since nothing that it attends to predicts it. The last row may be shorter.

    Raises:
        ValueError: If the tokenizer has no EOS token or yields an id that the model does not embed, or the texts are
            shorter than one sequence.
    """
    from datasets import Dataset, concatenate_datasets

    tokens = tokenised(dataset, tokenizer, text_column, vocab_size)
    packed = packed_by(tokens, Packer(sequence_length, documents_apart))
    count = int(lengths_of(tokens).sum())
    if not len(packed):
        raise ValueError(
            f"{key} has {count:,} tokens; expected at least one sequence of {sequence_length:,} tokens. Add text, or lower "
            "sequence_length (max_length in midus sft)."
        )
    dropped = count % sequence_length
    last = _last_sequence(tokens, dropped, documents_apart) if dropped > _DROPPED_SHARE * count else None
    if last is None:
        return PackedTexts(packed, count, dropped, False)
    shorter = Dataset.from_dict(last, features=packed.features)
    return PackedTexts(concatenate_datasets([packed, shorter]), count, 0, True)


def lengths_of(tokens: "Dataset") -> np.ndarray:
    """Return the number of tokens of each row that `tokenised` returns, `[rows]`, int64, without reading the tokens."""
    import pyarrow.compute

    return np.asarray(pyarrow.compute.list_value_length(tokens.data.column("input_ids")), np.int64)


def _last_sequence(tokens: "Dataset", count: int, documents_apart: bool) -> dict[str, list[Any]] | None:
    """Return the columns of a sequence of the last tokens, fewer than others have; None if it would predict nothing."""
    pieces: list[np.ndarray] = []
    is_begun = False  # whether the first piece is the end of a text
    for row in range(len(tokens) - 1, -1, -1):
        ids = tokens[row]["input_ids"]
        pieces.insert(0, np.asarray(ids[-count:], np.int32))
        is_begun = count < len(ids)
        count -= len(pieces[0])
        if not count:
            break
    last = Packer(sum(map(len, pieces)), documents_apart).end(pieces, is_begun)
    labels = last.get("labels", last["input_ids"])[0]
    return last if (labels[1:] != IGNORED_LABEL).any() else None


def tokenised(
    dataset: "Dataset", tokenizer: "PreTrainedTokenizerBase", text_column: str, vocab_size: int | None = None
) -> "Dataset":
    """Return the tokens of each text, ending in EOS, as rows with `input_ids`; all other columns are left out.

    Raises:
        ValueError: As `packed_sequences`.
    """
    from datasets.fingerprint import Hasher

    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, which ends every document; set eos_token in its folder.")
    return dataset.map(
        _tokenise,
        batched=True,
        batch_size=_TEXTS_A_BATCH,
        input_columns=[text_column],
        remove_columns=dataset.column_names,
        fn_kwargs={"tokenizer": tokenizer, "vocab_size": vocab_size},
        features=features_of("input_ids"),
        new_fingerprint=Hasher.hash([_PROCEDURE, dataset._fingerprint, tokenizer, text_column, vocab_size]),
        desc="tokenising",
    )


def _tokenise(texts: list[str], tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None) -> dict[str, Any]:
    from midus_hf.saved_models import check_ids

    eos, rows = tokenizer.eos_token_id, []
    for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        rows.append(ids if ids and ids[-1] == eos else [*ids, eos])
        if vocab_size is not None:
            check_ids(max(rows[-1]), vocab_size)
    return {"input_ids": rows}


class Packer:
    """Cuts rows of tokens, batch by batch, into sequences.

    Args:
        documents_apart: Whether tokens attend only within their text, so that sequences have positions and labels.
        fill: Id of the token that the last sequence of a leaf is filled up with. Default: None, there are no leaves, and
            the remainder waits for the next batch.
    """

    def __init__(self, sequence_length: int, documents_apart: bool, fill: int | None = None):
        self.sequence_length, self.documents_apart, self.fill = sequence_length, documents_apart, fill
        self._pieces: list[np.ndarray] = []  # tokens that are in no sequence yet
        self._continues = False  # whether the first of them goes on with a text whose beginning is in a sequence
        self._path: Any = None  # of the first text of the leaf that these belong to

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        packed: dict[str, list[Any]] = {name: [] for name in self.columns()}
        if self.fill is None:
            self._pieces += [np.asarray(ids, np.int32) for ids in batch["input_ids"]]
            self._cut(packed)
            return packed
        for ids, path, ends_leaf in zip(batch["input_ids"], batch["memory_ids"], batch["ends_leaf"], strict=True):
            self._path = path if self._path is None else self._path
            self._pieces.append(np.asarray(ids, np.int32))
            if ends_leaf:
                self._cut(packed, is_end=True)
                self._path = None
        return packed

    def end(self, pieces: list[np.ndarray], is_begun: bool) -> dict[str, list[Any]]:
        """Return the columns of a sequence of pieces of texts; `is_begun` says whether the first is the end of a text."""
        self._pieces, self._continues = pieces, is_begun
        packed: dict[str, list[Any]] = {name: [] for name in self.columns()}
        self._cut(packed, is_end=True)
        return packed

    def columns(self) -> list[str]:
        """Return the names of the columns of a sequence."""
        names = ["input_ids", *(["position_ids"] if self.documents_apart else [])]
        names += ["labels"] if self.documents_apart or self.fill is not None else []
        return names if self.fill is None else [*names, "memory_ids"]

    def _cut(self, packed: dict[str, list[Any]], is_end: bool = False) -> None:
        """Cut as many sequences as there are tokens for; at the end of a leaf, a filled up one that predicts a token."""
        length = self.sequence_length
        tokens = np.concatenate(self._pieces)
        starts = np.zeros(len(tokens), bool)
        starts[np.cumsum([0, *map(len, self._pieces[:-1])])] = True
        starts[0] = not self._continues
        whole = len(tokens) // length * length
        end = len(tokens) if is_end else whole
        for begin in range(0, end, length):
            piece, is_start = tokens[begin : begin + length], starts[begin : begin + length]
            missing = length - len(piece)
            labels = np.where(is_start & self.documents_apart, IGNORED_LABEL, piece).astype(np.int32)
            if missing:
                piece = np.concatenate([piece, np.full(missing, self.fill, np.int32)])
                labels = np.concatenate([labels, np.full(missing, IGNORED_LABEL, np.int32)])
                is_start = np.concatenate([is_start, np.arange(missing) == 0])
            if missing and not (labels[1:] != IGNORED_LABEL).any():
                continue  # a first token is not predicted, and the mean loss over no token is not a number
            packed["input_ids"].append(piece)
            if self.documents_apart:
                index = np.arange(length)
                packed["position_ids"].append(index - np.maximum.accumulate(np.where(is_start, index, 0)))
            if "labels" in packed:
                packed["labels"].append(labels)
            if "memory_ids" in packed:
                packed["memory_ids"].append(self._path)
        rest = tokens[end:]
        bounds = np.flatnonzero(starts[end:])
        self._continues = bool(len(rest)) and not starts[end]
        self._pieces = [part for part in np.split(rest, bounds[bounds > 0]) if len(part)]


def packed_by(tokens: "Dataset", packer: Packer) -> "Dataset":
    """Return the sequences that a packer cuts from rows of tokens.

    Args:
        tokens: Rows as from `tokenised`, with the other columns that the packer reads.
        packer: A packer that has cut nothing yet. With equal tokens and settings, sequences are read from the cache.
    """
    from datasets.fingerprint import Hasher

    return tokens.map(
        packer,
        batched=True,
        batch_size=_TEXTS_A_BATCH,
        remove_columns=tokens.column_names,
        features=features_of(*packer.columns()),
        new_fingerprint=Hasher.hash([_PROCEDURE, tokens._fingerprint, packer]),
        desc="packing",
    )


def features_of(*names: str) -> Any:
    """Return the `Features` of a dataset whose columns are lists of numbers: int64 for `memory_ids`, int32 for all others."""
    from datasets import Features, LargeList, Value

    return Features({name: LargeList(Value("int64" if name == "memory_ids" else "int32")) for name in names})


def collate(rows: list[dict[str, Any]], sequence_length: int, fill: int) -> dict[str, torch.Tensor]:
    """Return the columns of rows as tensors `[B, T]`, int64; tokens are their own labels where rows have none.

    A shorter row is filled up behind its end: with the token `fill`, on which no loss is computed, and to which no other token
    attends. Only batches with such a row have an attention mask, unless positions keep texts apart.
    """
    missing = [sequence_length - len(row["input_ids"]) for row in rows]
    if any(missing):
        rows = [_filled_up(row, count, fill) for row, count in zip(rows, missing, strict=True)]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return batch if "labels" in batch else {**batch, "labels": batch["input_ids"].clone()}


def _filled_up(row: dict[str, Any], count: int, fill: int) -> dict[str, Any]:
    tokens = row["input_ids"]
    labels = [*row.get("labels", tokens), *[IGNORED_LABEL] * count]
    filled = {**row, "input_ids": [*tokens, *[fill] * count], "labels": labels}
    if "position_ids" in row:  # what fills up is a text of its own
        return {**filled, "position_ids": [*row["position_ids"], *range(count)]}
    return {**filled, "attention_mask": [1] * len(tokens) + [0] * count}
