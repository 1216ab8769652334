"""Texts packed into sequences of one length, as Trainers read them.

Every text is tokenised and ends in EOS; all are concatenated and cut into sequences of `sequence_length` tokens. A remainder of more
than 1 % of the tokens becomes a shorter sequence, else it is dropped. `datasets` caches the results.

If the tokenizer puts tokens before a text (`prefix_ids`: BOS of Llama and Gemma), every sequence begins with them. A sequence that
begins with a text has them already; one that continues a text gets them masked from the loss, in place of as many tokens.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from midus_hf.config.errors import RequestError, format_count
from midus_hf.data.corpus import DocumentPaths, read_paths
from midus_hf.memories.hierarchical.bank import check_paths
from midus_hf.memories.hierarchical.options import BankLayout

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED_LABEL = -100

# Change this with any change to sequences: cached ones are then not reused.
_PROCEDURE = "4"
_TEXTS_A_BATCH = 1000
DROPPED_SHARE = 0.01


class TooFewTokensError(RequestError):
    """Error for texts that fill no sequence."""


class PackedTexts(NamedTuple):
    """Sequences, the numbers of tokens of texts and of dropped ones, and whether a sequence is padded."""

    sequences: "Dataset"
    tokens: int
    dropped: int
    is_short: bool

    def phrase(self, sequence_length: int) -> str:
        sequences = format_count(len(self.sequences), "sequence")
        short = ", the last padded" if self.is_short else ""
        dropped = f"; the last {self.dropped:,} fill no sequence and are dropped" if self.dropped else ""
        read = f"{self.tokens - self.dropped:,} of {self.tokens:,} tokens are read"
        return f"{read}, in {sequences} of {sequence_length:,}{short}{dropped}"


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
    """Return texts as rows with `input_ids` `[T]`; the last may be shorter.

    With `documents_apart`, tokens attend only within their text: rows have `position_ids` `[T]`, which restart at each text, and
    `labels` `[T]`, in which each text's first token is ignored. With several `prefix_ids`, rows have `labels` too. `key` names the
    texts in messages; ids are checked against `vocab_size`, if it is given.
    """
    from datasets import Dataset, concatenate_datasets

    beginning = beginning_within(sequence_length, tokenizer)
    tokens, lengths = _tokenised(dataset, tokenizer, text_column, vocab_size)
    packer = Packer(sequence_length, documents_apart, beginning)
    count = int(lengths.sum())
    packed = _mapped(tokens, packer, packer.columns, [packer], desc="packing")
    if not len(packed):
        raise TooFewTokensError(too_few_tokens(key, count, sequence_length))
    dropped, _ = _remainder(lengths, sequence_length, len(beginning))
    last = None
    if dropped > DROPPED_SHARE * count:
        last = _last_sequence(tokens, dropped, Packer(sequence_length, documents_apart, beginning))
    if last is None:
        return PackedTexts(packed, count, dropped, False)
    shorter = Dataset.from_dict(last, features=packed.features)
    return PackedTexts(concatenate_datasets([packed, shorter]), count, 0, True)


def too_few_tokens(key: str, count: int, sequence_length: int) -> str:
    return (
        f"{key} has {count:,} tokens; expected at least one sequence of {sequence_length:,} tokens. Add text, or lower "
        "sequence_length (max_length in midus sft)."
    )


def beginning_within(sequence_length: int, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that sequences begin with; refuse too short sequences, and tokenizers without EOS."""
    from midus_hf.sources.tokenizers import prefix_ids

    if tokenizer.eos_token_id is None:
        raise RequestError("the tokenizer has no EOS token, which ends every document; set eos_token in its folder.")
    beginning = prefix_ids(tokenizer)
    if sequence_length <= len(beginning):
        raise RequestError(
            f"sequence_length is {sequence_length}, and the tokenizer puts {len(beginning)} tokens before every text; expected "
            "sequences of more tokens. Raise sequence_length (max_length in midus sft)."
        )
    return beginning


def _remainder(lengths: np.ndarray, sequence_length: int, num_before: int) -> tuple[int, int]:
    """Return how many tokens follow the last whole sequence, and how many precede them."""
    ends = np.cumsum(lengths)
    if not num_before:
        return int(ends[-1]) % sequence_length, 0
    starts = [0, *ends[:-1].tolist()]
    total = int(ends[-1])
    begin = added = 0
    while begin + sequence_length - added <= total:
        begin += sequence_length - added
        added = min(begin - starts[bisect_right(starts, begin) - 1], num_before)
    return total - begin, added if begin < total else 0


def _last_sequence(tokens: "Dataset", count: int, packer: "Packer") -> dict[str, list[Any]] | None:
    for row in range(len(tokens) - 1, -1, -1):
        ids = tokens[row]["input_ids"]
        packer.pieces.insert(0, np.asarray(ids[-count:], np.int32))
        packer.place = len(ids) - len(packer.pieces[0])
        count -= len(packer.pieces[0])
        if not count:
            break
    return packer.last()


def leaf_sequences(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    *,
    paths: np.ndarray,
    depth: int | None = None,
    documents_apart: bool,
    text_column: str = "text",
    vocab_size: int | None = None,
) -> PackedTexts:
    """Return sequences within a tree's leaves (hierarchical memories, A.2): `labels` and `memory_ids` too.

    A leaf is a node of the deepest level with blocks, `depth`, so its texts fetch the same blocks, by the first of their `paths`
    `[texts, p]`. The remainder of a leaf becomes a sequence too, padded with EOS without a loss, unless it is one token that nothing
    predicts.
    """
    beginning = beginning_within(sequence_length, tokenizer)
    levels = paths[:, :depth]
    order = np.lexsort(levels.T[::-1])
    levels = levels[order]
    ends = np.append((levels[1:] != levels[:-1]).any(1), True)
    tokens, lengths = _tokenised(dataset, tokenizer, text_column, vocab_size)
    lengths = lengths[order]
    tokens = tokens.select(order)
    leaves = np.split(lengths, np.flatnonzero(ends)[:-1] + 1)
    rests = np.array([sum(_remainder(leaf, sequence_length, len(beginning))) for leaf in leaves])
    tokens = tokens.add_column("memory_ids", list(paths[order])).add_column("ends_leaf", ends)
    packer = Packer(sequence_length, documents_apart, beginning, tokenizer.eos_token_id)
    packed = _mapped(tokens, packer, packer.columns, [packer], desc="packing")
    return PackedTexts(packed, int(lengths.sum()), int((rests == 1).sum()), bool((rests > 1).any()))


def checked_paths(
    dataset: "Dataset", banks: Mapping[str, BankLayout], path_column: str, text: str = "the corpus"
) -> DocumentPaths:
    """Return paths as `read_paths` does; refuse those that do not fit the tree of the model's banks."""
    if not banks:
        raise RequestError(
            f"path_column is {path_column!r}, but the model has no memory that fetches blocks; leave it out, or upscale with one of "
            "the methods hier-ffn, hier-lora-qk, hier-lora-vo, hier-lora-ffn and hier-kv."
        )
    written = read_paths(dataset, path_column, text)
    for layout in banks.values():
        check_paths(torch.from_numpy(written.paths), layout, f"column {path_column!r} of {text}")
    return written


def _tokenised(
    dataset: "Dataset", tokenizer: "PreTrainedTokenizerBase", text_column: str, vocab_size: int | None
) -> tuple["Dataset", np.ndarray]:
    import pyarrow.compute

    options: dict[str, Any] = {"input_columns": [text_column], "desc": "tokenising"}
    options["fn_kwargs"] = {"tokenizer": tokenizer, "vocab_size": vocab_size}
    tokens = _mapped(dataset, tokenise, ["input_ids"], [tokenizer, text_column, vocab_size], **options)
    return tokens, np.asarray(pyarrow.compute.list_value_length(tokens.data.column("input_ids")), np.int64)


def tokenise(texts: list[str], tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None) -> dict[str, Any]:
    """Return the tokens of each text, ending in EOS."""
    from midus_hf.sources.tokenizers import check_ids

    eos = tokenizer.eos_token_id
    rows = []
    for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        rows.append(ids if ids and ids[-1] == eos else [*ids, eos])
        if vocab_size is not None:
            check_ids(max(rows[-1]), vocab_size)
    return {"input_ids": rows}


class Packer:
    """Cuts rows of tokens, batch by batch, into sequences.

    With `documents_apart`, sequences have positions and labels. With `fill`, rows belong to leaves, whose last sequences are padded
    with this token; otherwise the remainder waits for the next batch. Texts and sequences begin with the tokens `beginning`.
    """

    def __init__(
        self, sequence_length: int, documents_apart: bool, beginning: Sequence[int] = (), fill: int | None = None
    ):
        self.sequence_length = sequence_length
        self.documents_apart = documents_apart
        self.fill = fill
        self.beginning = np.array(beginning, np.int32)
        self.place = 0  # place in its text of the first token that is in no sequence yet
        self.pieces: list[np.ndarray] = []  # tokens that are in no sequence yet
        self.path: Any = None  # of the first text of the leaf that these belong to
        # The first token of a sequence is not predicted, whatever its label is.
        has_labels = documents_apart or fill is not None or len(beginning) > 1
        conditions = {"position_ids": documents_apart, "labels": has_labels, "memory_ids": fill is not None}
        self.columns = ["input_ids", *(name for name, is_present in conditions.items() if is_present)]

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        packed: dict[str, list[Any]] = {name: [] for name in self.columns}
        if self.fill is None:
            self.pieces += [np.asarray(ids, np.int32) for ids in batch["input_ids"]]
            self._cut(packed)
            return packed
        for ids, path, ends_leaf in zip(batch["input_ids"], batch["memory_ids"], batch["ends_leaf"], strict=True):
            self.path = path if self.path is None else self.path
            self.pieces.append(np.asarray(ids, np.int32))
            self._cut(packed, is_end=ends_leaf)
            if ends_leaf:
                self.path = None
        return packed

    def last(self) -> dict[str, list[Any]] | None:
        """Return the remaining tokens as a sequence, shorter or filled up; None if it predicts nothing."""
        packed: dict[str, list[Any]] = {name: [] for name in self.columns}
        if self.fill is None:
            self.sequence_length = min(self.place, len(self.beginning)) + sum(map(len, self.pieces))
        self._cut(packed, is_end=True)
        labels = packed.get("labels", packed["input_ids"])
        return packed if labels and (labels[0][1:] != IGNORED_LABEL).any() else None

    def _cut(self, packed: dict[str, list[Any]], is_end: bool = False) -> None:
        """Cut all whole sequences; at the end of a leaf, also a padded one if it predicts a token."""
        length = self.sequence_length
        tokens = np.concatenate(self.pieces)
        places = np.concatenate([np.arange(len(piece)) for piece in self.pieces])
        places[: len(self.pieces[0])] += self.place
        begin = 0
        while begin < len(tokens):
            added = self.beginning[: places[begin]]  # a text that begins here has them itself
            end = begin + length - len(added)
            if end > len(tokens) and not is_end:
                break
            piece = np.concatenate([added, tokens[begin:end]])
            is_start = np.concatenate([np.arange(len(added)) == 0, places[begin:end] == 0])
            missing = length - len(piece)
            labels = np.where(is_start & self.documents_apart, IGNORED_LABEL, piece).astype(np.int32)
            labels[: len(added)] = IGNORED_LABEL
            if missing:
                piece = np.concatenate([piece, np.full(missing, self.fill, np.int32)])
                labels = np.concatenate([labels, np.full(missing, IGNORED_LABEL, np.int32)])
                is_start = np.concatenate([is_start, np.arange(missing) == 0])
            begin = min(end, len(tokens))
            if missing and not (labels[1:] != IGNORED_LABEL).any():
                continue  # a first token is not predicted, and the mean loss over no token is not a number
            index = np.arange(length)
            positions = index - np.maximum.accumulate(np.where(is_start, index, 0))
            made = {"input_ids": piece, "position_ids": positions, "labels": labels, "memory_ids": self.path}
            for name, values in packed.items():
                values.append(made[name])
        bounds = np.flatnonzero(places[begin:] == 0)
        self.place = int(places[begin]) if begin < len(tokens) else 0
        self.pieces = [part for part in np.split(tokens[begin:], bounds[bounds > 0]) if len(part)]


def _mapped(rows: "Dataset", function: Any, columns: Sequence[str], identity: list[Any], **options: Any) -> "Dataset":
    """Return a function's rows of these columns for batches of rows; `datasets` caches them by `identity`."""
    from datasets import Features, LargeList, Value
    from datasets.fingerprint import Hasher

    features = {name: LargeList(Value("int64" if name == "memory_ids" else "int32")) for name in columns}
    return rows.map(
        function,
        batched=True,
        batch_size=_TEXTS_A_BATCH,
        remove_columns=rows.column_names,
        features=Features(features),
        new_fingerprint=Hasher.hash([_PROCEDURE, rows._fingerprint, *identity]),
        **options,
    )


def collate(rows: list[dict[str, Any]], sequence_length: int, fill: int) -> dict[str, torch.Tensor]:
    """Return the columns of rows as tensors `[B, T]`, int64; labels default to the tokens.

    A shorter row is padded at its end with `fill`, without loss or attention. Only batches with such a row have an attention mask,
    unless positions keep texts apart.
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
    if "position_ids" in row:  # padding counts as a separate text
        return {**filled, "position_ids": [*row["position_ids"], *range(count)]}
    return {**filled, "attention_mask": [1] * len(tokens) + [0] * count}
