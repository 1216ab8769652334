"""Positions where a model with a memory of n-grams or names can differ from the model without it, found from token ids alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from midus_hf.config.errors import RequestError
from midus_hf.look.page import Row, TextTable, table_of
from midus_hf.memories.engram.known_ngrams import KnownNgrams, exact_tables, sorted_tensors, texts_digest
from midus_hf.memories.packs.glossary import Glossary, read_glossary
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.registry import TABLES, Memories
from midus_hf.training.protection import compare_texts

HOW_TO_READ = (
    "A token reads a row if an n-gram that ends at it has one, and a pack from its name to the end of the document. Before the first "
    "such token of a document, the model computes the same as without the memory, bit for bit; a document without one is "
    "untouched. No model runs for this."
)
_COLUMNS = {
    "text": "{text}",
    "memory": "{memory}",
    "documents": "{documents:,}",
    "untouched": "{untouched:,}",
    "tokens": "{tokens:,}",
    "read a row": "{reading:.3%}",
    "can differ": "{differing:.3%}",
    "certified": "{certified}",
}


@dataclass(frozen=True)
class TouchedTokens:
    """Counts of the rows that one memory reads for the documents of one text."""

    tokens: torch.Tensor
    reading: torch.Tensor
    first: torch.Tensor


class Names(NamedTuple):
    """The names of a memory of packs."""

    memory: str
    glossary: Glossary


def tables_in(folder: Path, config: PreTrainedConfig, tokenizer: Any) -> list[KnownNgrams | Names]:
    """Return the tables of known n-grams and of names of a saved model, read from its files, and its tokenizer."""
    memories: Memories | None = config.memories() if hasattr(config, "memories") else None
    tables: list[KnownNgrams | Names] = []
    if memories is not None:
        tables += exact_tables(memories, dict(sorted_tensors(folder, _is_table)))
        for name, entry in memories.attached.items():
            if isinstance(entry.options, PacksOptions):
                tables.append(Names(name, Glossary(tokenizer, read_glossary(folder))))
    if not tables:
        raise RequestError(
            f"{folder} has no memory of known n-grams or names; expected a model that was upscaled with --method packs, or with "
            "--method engram --set table=exact."
        )
    return tables


def _is_table(name: str) -> bool:
    return f"{TABLES}." in name


def touched(table: KnownNgrams | Names, documents: Sequence[str], tokenizer: Any) -> TouchedTokens:
    """Return which rows a memory reads for documents."""
    if isinstance(table, Names):
        return _behind_names(table.glossary, documents, tokenizer)
    count = len(documents)
    tokens, reading = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    firsts = []
    for part in table.keys_of(documents, tokenizer):
        lengths = torch.tensor([len(ids) for ids in part.ids])
        begins = lengths.cumsum(0) - lengths
        reads = table.reads(part.keys)
        tokens.index_add_(0, part.texts, torch.ones_like(part.texts))
        reading.index_add_(0, part.texts, reads.long())
        within = torch.arange(len(reads)) - begins.repeat_interleave(lengths)
        first = lengths.clone()
        document_of = torch.arange(len(lengths)).repeat_interleave(lengths)
        firsts.append(first.scatter_reduce(0, document_of[reads], within[reads], "amin"))
    return TouchedTokens(tokens, reading, torch.cat(firsts))


def _behind_names(glossary: Glossary, documents: Sequence[str], tokenizer: Any) -> TouchedTokens:
    """Return how many tokens of documents are at or after a name, and may read its pack."""
    tokens, first = [], []
    for ids in tokenizer(list(documents), verbose=False)["input_ids"]:
        tokens.append(len(ids))
        first.append(next((at for at, _ in glossary.opened(ids)), len(ids)))
    counts, firsts = torch.tensor(tokens), torch.tensor(first)
    return TouchedTokens(counts, counts - firsts, firsts)


def prove_untouched(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, Sequence[str]],
    counts: Mapping[tuple[str, str], TouchedTokens],
) -> int:
    """Compute untouched documents with and without the memory, and return their number.

    Raises:
        RuntimeError: If logits differ.
    """
    proven = 0
    for (text, memory), one in counts.items():
        untouched = [
            document for document, reading in zip(texts[text], one.reading.tolist(), strict=True) if not reading
        ]
        compared = compare_texts(model, tokenizer, untouched, [memory])
        if compared.differing:
            raise RuntimeError(
                f"{len(compared.differing)} untouched documents of {text} have different logits with memory {memory!r} than without "
                "it. This is a fault of midus_hf: please report it."
            )
        proven += len(untouched)
    return proven


def touched_rows(
    texts: Mapping[str, Sequence[str]],
    counts: Mapping[tuple[str, str], TouchedTokens],
    certificate: Mapping[str, Any] | None,
) -> list[Row]:
    """Return a row per text and memory."""
    known = {} if certificate is None else {text["sha256"]: text["name"] for text in certificate["texts"]}
    certified = {name: texts_digest(documents) in known for name, documents in texts.items()} if known else {}

    def _certified(one: TouchedTokens, text: str, memory: str) -> str:
        named = certificate is not None and memory in certificate["memories"]
        return "yes" if named and certified.get(text) and not one.reading.any() else "no"

    rows: list[Row] = []
    for (text, memory), one in counts.items():
        total = int(one.tokens.sum())
        rows.append(
            {
                "text": text,
                "memory": memory,
                "documents": len(one.tokens),
                "untouched": int((one.reading == 0).sum()),
                "tokens": total,
                "reading": int(one.reading.sum()) / max(1, total),
                "differing": int((one.tokens - one.first).sum()) / max(1, total),
                "certified": _certified(one, text, memory),
            }
        )
    return rows


def document_rows(counts: Mapping[tuple[str, str], TouchedTokens]) -> list[Row]:
    """Return a row per text, memory and document: its number, tokens, how many read a row, and the first that does."""
    return [
        {
            "text": text,
            "memory": memory,
            "document": number,
            "tokens": tokens,
            "reading": reading,
            "first": first if reading else None,
        }
        for (text, memory), one in counts.items()
        for number, (tokens, reading, first) in enumerate(
            zip(one.tokens.tolist(), one.reading.tolist(), one.first.tolist(), strict=True)
        )
    ]


def touched_table(rows: Sequence[Row]) -> TextTable:
    """Return the rows of `touched_rows` as a table."""
    return table_of("Where texts read a memory", rows, _COLUMNS)
