"""Corpora that replay earlier ones: a share of the tokens of a stage comes from the stages before."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_TOKENS_IN_BATCHES_OF = 64


def write_replayed(
    output: Path, corpora: Sequence[Sequence[str]], share: float, tokens: int, tokenizer: Any, seed: int
) -> list[int]:
    """Write the corpus of a stage, of which a share of the tokens comes from earlier corpora, evenly.

    Documents are drawn without replacement, again from the beginning where a corpus has too few, and the last document of each corpus
    is cut. A document counts with the token that training puts behind it.

    Args:
        output: File of JSON lines to write.
        corpora: Documents of each corpus; the last is that of the stage itself.
        share: Share of the tokens that the earlier corpora give together.
        tokens: Number of tokens that the stage trains on.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order of documents.

    Returns:
        How many tokens each corpus gives.
    """
    earlier = len(corpora) - 1
    counts = [int(share * tokens / earlier)] * earlier
    # A token of each corpus may be lost at a cut; a sequence that is not whole is not trained on.
    counts.append(tokens - sum(counts) + len(corpora))
    rows = []
    for number, (documents, count) in enumerate(zip(corpora, counts, strict=True)):
        left = count
        for text, ids in _in_random_order(documents, tokenizer, random.Random(f"{seed}/{number}")):
            if left <= 1:
                break
            if len(ids) + 1 > left:
                text, ids = tokenizer.decode(ids[: left - 1], skip_special_tokens=True), ids[: left - 1]
            rows.append(text)
            left -= len(ids) + 1
    output.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    return counts


def _in_random_order(
    documents: Sequence[str], tokenizer: Any, order: random.Random
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield documents with their tokens in random order, without end, each as often as the others."""
    while True:
        shuffled = order.sample(documents, len(documents))
        for begin in range(0, len(shuffled), _TOKENS_IN_BATCHES_OF):
            texts = shuffled[begin : begin + _TOKENS_IN_BATCHES_OF]
            ids = tokenizer(texts, verbose=False)["input_ids"]
            yield from zip(texts, ids, strict=True)
