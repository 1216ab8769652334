"""Positions where a memory of n-grams or names can change a model's output, found from token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from midus_hf.config.errors import RequestError
from midus_hf.look.page import Row, TextTable, table_of
from midus_hf.memories.engram.known_ngrams import KnownNgrams, exact_tables, sorted_tensors
from midus_hf.memories.packs.glossary import Glossary, read_glossary
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.registry import TABLES, Memories
from midus_hf.sources.characters import texts_digest
from midus_hf.training.protection import compare_texts

HOW_TO_READ = (
    "A token reads a row if an n-gram that ends at it has one. Of a glossary, all tokens from the first name of a document on are "
    "counted: where an entry is read no more, they still follow tokens that read it. Before the first such token, the model "
    "computes the same as without the memory, bit for bit; a document without one is untouched. No model runs for this."
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


class TouchedTokens(NamedTuple):
    """What a memory reads for a text's documents: tokens, how many read, and the first that does."""

    tokens: torch.Tensor
    reading: torch.Tensor
    first: torch.Tensor


class GlossaryNames(NamedTuple):
    """The names of a memory of packs."""

    memory: str
    glossary: Glossary


def tables_in(folder: Path, config: PreTrainedConfig, tokenizer: Any) -> list[KnownNgrams | GlossaryNames]:
    """Return the known n-grams and the names of a saved model, read from its files, and its tokenizer."""
    memories: Memories | None = config.memories() if hasattr(config, "memories") else None
    tables: list[KnownNgrams | GlossaryNames] = []
    if memories is not None:
        tables += exact_tables(memories, dict(sorted_tensors(folder, lambda name: f"{TABLES}." in name)))
        packs = [name for name, entry in memories.attached.items() if isinstance(entry.options, PacksOptions)]
        tables += [GlossaryNames(name, Glossary(tokenizer, read_glossary(folder))) for name in packs]
    if not tables:
        raise RequestError(
            f"{folder} has no memory of known n-grams or names; expected a model that was upscaled with --method packs, or with "
            "--method engram --set table=exact."
        )
    return tables


def touched(table: KnownNgrams | GlossaryNames, documents: Sequence[str], tokenizer: Any) -> TouchedTokens:
    """Return what a memory reads for documents: rows of n-grams, or packs from the first name on."""
    counts = []
    if isinstance(table, GlossaryNames):
        for ids in tokenizer(list(documents), verbose=False)["input_ids"]:
            first = next(iter(table.glossary.opened(ids)), (len(ids), 0))[0]
            counts.append((len(ids), len(ids) - first, first))
    else:
        for part in table.keys_of(documents, tokenizer):
            for reads in table.reads(part.keys).split([len(ids) for ids in part.ids]):
                places = reads.nonzero().flatten().tolist()
                counts.append((len(reads), len(places), places[0] if places else len(reads)))
    return TouchedTokens(*torch.tensor(counts, dtype=torch.int64).view(-1, 3).unbind(1))


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
        _, differing = compare_texts(model, tokenizer, untouched, [memory])
        if differing:
            raise RuntimeError(
                f"{len(differing)} untouched documents of {text} have different logits with memory {memory!r} than without "
                "it. This is a fault of midus_hf: please report it."
            )
        proven += len(untouched)
    return proven


def touched_rows(
    texts: Mapping[str, Sequence[str]],
    counts: Mapping[tuple[str, str], TouchedTokens],
    certificate: Mapping[str, Any] | None,
) -> list[Row]:
    """Return a row for each text and memory: how many documents and tokens read n-grams or names."""
    known = {} if certificate is None else {text["sha256"]: text["name"] for text in certificate["texts"]}
    certified = {name: texts_digest(documents) in known for name, documents in texts.items()} if known else {}
    rows: list[Row] = []
    for (text, memory), one in counts.items():
        total = int(one.tokens.sum())
        is_certified = certificate is not None and memory in certificate["memories"] and certified.get(text)
        rows.append(
            {
                "text": text,
                "memory": memory,
                "documents": len(one.tokens),
                "untouched": int((one.reading == 0).sum()),
                "tokens": total,
                "reading": int(one.reading.sum()) / max(1, total),
                "differing": int((one.tokens - one.first).sum()) / max(1, total),
                "certified": "yes" if is_certified and not one.reading.any() else "no",
            }
        )
    return rows


def document_rows(counts: Mapping[tuple[str, str], TouchedTokens]) -> list[Row]:
    """Return a row per text, memory and document: tokens, how many read, and the first that does."""
    keys = ("text", "memory", "document", "tokens", "reading", "first")
    return [
        dict(zip(keys, (text, memory, number, tokens, reading, first if reading else None), strict=True))
        for (text, memory), one in counts.items()
        for number, (tokens, reading, first) in enumerate(torch.stack(one, 1).tolist())
    ]


def touched_table(rows: Sequence[Row]) -> TextTable:
    return table_of("Where texts read a memory", rows, _COLUMNS)
