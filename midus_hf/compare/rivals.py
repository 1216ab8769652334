"""What one model that learns stages in order is held against: earlier corpora replayed, and a model per stage behind a retriever."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from midus_hf.topics.building import calibrate
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.memory_retriever import paths_near_topics
from midus_hf.topics.tree import ClusterTree

_DOCUMENTS_TOKENISED_TOGETHER = 64
# Documents of a corpus, spread evenly over it, whose embeddings make the centroid of its stage.
_MOST_DOCUMENTS = 1000


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
        for begin in range(0, len(shuffled), _DOCUMENTS_TOKENISED_TOGETHER):
            texts = shuffled[begin : begin + _DOCUMENTS_TOKENISED_TOGETHER]
            ids = tokenizer(texts, verbose=False)["input_ids"]
            yield from zip(texts, ids, strict=True)


class StageFinder:
    """Finder of the stage whose corpus is nearest to a document.

    Embeddings are of the first tokens of a document, as many as the embedding model reads.

    Args:
        embedding_model: Folder or Hub id of an encoder, as for trees of topics.
        corpora: Documents of each stage's corpus, by the stage's name.
        validation: Documents of each stage that are not in its corpus. The least similarity of documents that have a stage is
            measured on them, as that of a tree of topics is: 95 of 100 stretches of each length reach it.
    """

    def __init__(
        self, embedding_model: str, corpora: Mapping[str, Sequence[str]], validation: Mapping[str, Sequence[str]]
    ):
        self._embedder = TextEmbedder(embedding_model)
        self._validation = validation
        centroids = {name: self._embedder.embed(_spread(documents)).mean(0) for name, documents in corpora.items()}
        self._centroids = {name: torch.nn.functional.normalize(row, dim=-1) for name, row in centroids.items()}

    def embed(self, documents: Sequence[str]) -> torch.Tensor:
        """Return the embeddings of documents, `[N, c]`."""
        return self._embedder.embed(documents)

    def stages_of(self, embeddings: torch.Tensor, num_stages: int) -> list[int]:
        """Return the nearest of the first stages for each embedding; -1 where it is near to none of them."""
        tree = self._tree(num_stages)
        return paths_near_topics(tree, embeddings, tree.min_similarity)[:, 0].tolist()

    def _tree(self, num_stages: int) -> ClusterTree:
        """Return a tree with one topic per stage, whose least similarity is that of the stages' validation documents."""
        names = list(self._centroids)[:num_stages]
        rows = torch.stack([self._centroids[name] for name in names])
        lacking = torch.full((max(0, 2 - len(names)), rows.shape[1]), torch.nan)  # a tree has two topics or more
        tree = ClusterTree(2, [torch.cat([rows, lacking])])
        calibrate(tree, [text for name in names for text in self._validation[name]], self._embedder.embed, seed=0)
        return tree


def _spread(documents: Sequence[str]) -> list[str]:
    """Return at most `_MOST_DOCUMENTS` documents, spread evenly."""
    count = min(len(documents), _MOST_DOCUMENTS)
    return [documents[number * len(documents) // count] for number in range(count)]
