"""Sequences of a run: chats as tokens, with labels where there is a loss, cut to a length and perhaps packed."""

import dataclasses
from array import array

import numpy as np
import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from midus_hf.documents import DocumentError
from midus_hf.sft.encoding import encode_rows
from midus_hf.sft.options import SftConfig
from midus_hf.sft.rows import iterate_rows

NO_LABEL = -100


@dataclasses.dataclass
class ChatDataset:
    """Sequences made from the data of a run, with counts of what was read and left out.

    Args:
        dataset: Rows with `input_ids` and `labels`, and `seq_lengths` if packed.
        rows: Number of rows that were read.
        examples: Number of examples that the run trains on.
        tokens: Number of tokens of these examples.
        labels: Number of these tokens that have a loss.
        cut: Number of these examples that were longer than a sequence.
        without_answer: Number of rows left out because they have no answer, or none within a sequence.
        last_token: Id of the token that ends the first whole chat; None if the data is plain text, or no chat is whole.
        ends: Whether `last_token` is special, so that generation can stop at it; true if `last_token` is None.
    """

    dataset: Dataset
    rows: int
    examples: int
    tokens: int
    labels: int
    cut: int
    without_answer: int
    last_token: int | None
    ends: bool

    def describe(self, config: SftConfig) -> list[str]:
        """Return sentences about what was read, left out and made.

        Args:
            config: The options of the run.
        """
        lines = [
            f"{self.examples:,} examples, {self.tokens:,} tokens, {self.labels:,} of them with a loss "
            f"({self.labels / self.tokens:.1%})"
        ]
        if self.cut:
            lines.append(f"{self.cut:,} were longer than {config.max_length:,} tokens and were cut there")
        if self.without_answer:
            lines.append(f"{self.without_answer:,} of {self.rows:,} rows were left out: no answer within a sequence")
        if not self.ends:
            lines.append("the chat template ends answers with no special token, so the model will not learn to stop")
        if config.packing:
            filled = self.tokens / (len(self.dataset) * config.max_length)
            lines.append(f"packed into {len(self.dataset):,} sequences, {filled:.1%} full")
        return lines


def build_chat_dataset(config: SftConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> ChatDataset:
    """Read the data of a run and turn it into sequences.

    Args:
        config: The options of the run.
        tokenizer: Tokenizer of the model; it gets the chat template that the options name.
        vocab_size: Number of ids the model embeds.

    Raises:
        DocumentError: If the data cannot be read, or holds no answer.
        ValueError: If there is no chat template, the tokenizer cannot report which characters each token covers, or an
            id is too large for the model's embeddings.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}, which does not tell where in a text its tokens come from; expected "
            "one with a tokenizer.json."
        )
    ids, labels, lengths = array("i"), array("i"), array("q", [0])
    rows = cut = without_answer = 0
    last_token: int | None = None
    for tokens in encode_rows(tokenizer, iterate_rows(config), config.dataset_format, config.chat_template):
        rows += 1
        if tokens.ids and max(tokens.ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer makes id {max(tokens.ids)}, but the model embeds {vocab_size}; expected the model's own."
            )
        kept = tokens.cut(config.max_length)
        # No token predicts the first one of a sequence, so only later tokens can have a loss.
        if not any(kept.in_answer[1:]):
            without_answer += 1
            continue
        if last_token is None and tokens.is_chat and len(kept.ids) == len(tokens.ids):
            last_token = [token for token, inside in zip(kept.ids, kept.in_answer, strict=True) if inside][-1]
        cut += len(kept.ids) < len(tokens.ids)
        ids.extend(kept.ids)
        labels.extend(
            token if inside or not config.assistant_only_loss else NO_LABEL
            for token, inside in zip(kept.ids, kept.in_answer, strict=True)
        )
        lengths.append(len(ids))
    if len(lengths) == 1:
        raise DocumentError(
            f"dataset_name is {config.dataset_name!r}, which has {rows:,} rows and no answer to learn from within "
            f"{config.max_length:,} tokens. Add data, or raise max_length."
        )
    with_loss = sum(label != NO_LABEL for label in labels)
    dataset = _as_dataset(ids, labels, lengths)
    if config.packing:
        dataset = pack_dataset(dataset, config.max_length)
    ends = last_token is None or is_special(tokenizer, last_token)
    return ChatDataset(dataset, rows, len(lengths) - 1, len(ids), with_loss, cut, without_answer, last_token, ends)


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is a special mark rather than text.

    Args:
        tokenizer: Tokenizer that has the token.
        token: Id of the token.
    """
    added_tokens = tokenizer.added_tokens_decoder
    return token in tokenizer.all_special_ids or (token in added_tokens and added_tokens[token].special)


def _as_dataset(ids: array, labels: array, ends: array) -> Dataset:
    def column(values: array) -> pyarrow.Array:
        return pyarrow.LargeListArray.from_arrays(np.asarray(ends), np.asarray(values))

    return Dataset(pyarrow.table({"input_ids": column(ids), "labels": column(labels)}))
