"""A step for pipelines of datatrove, which read, filter and write corpora on many machines. Needs the package datatrove."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from datatrove.pipeline.base import PipelineStep

from clusters.assigning import document_paths
from clusters.corpus import Document, load_fast_tokenizer
from midus_hf.retrieval import MemoryRetriever

_DOCUMENTS = 256
"""Documents that are taken from the step before at a time."""


class AssignPaths(PipelineStep):
    """Gives each document its path in a tree: `memory_ids` and `windows` in its metadata, as `midus-cluster assign` writes them.

    The tree and its model are loaded when the step begins to run, in the process that runs it. Documents that hold nothing but
    white space pass as they are.

    Args:
        tree: Folder that `midus-cluster build` has made.
        embedding_model: Where its embedding model lies. Default: where it lay when the tree was built.
        tokenizer: Where the tokenizer lies that cuts windows. Default: where it lay.
        device: As in `TextEmbedder`. Default: `"cpu"`.
        batch_size: As in `TextEmbedder`. Default: 64.
        blocked: As in `ClusterTree.paths`. Default: none.
    """

    name = "paths in a tree of topics"
    type = "clusters"

    def __init__(
        self,
        tree: str,
        embedding_model: str | None = None,
        tokenizer: str | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        blocked: Sequence[tuple[int, int]] = (),
    ):
        super().__init__()
        self.tree, self.embedding_model, self.tokenizer = tree, embedding_model, tokenizer
        self.device, self.batch_size, self.blocked = device, batch_size, tuple(blocked)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Pass on the documents of the step before, in their order.

        Args:
            data: Its documents; each process has its own.
            rank: Of the process; not used. Default: 0.
            world_size: Processes; not used. Default: 1.

        Raises:
            ValueError: As `MemoryRetriever.load` and `load_fast_tokenizer`, or if nobody says which tokenizer it is.
        """
        retriever = MemoryRetriever.load(self.tree, self.embedding_model, self.device, self.batch_size)
        origin = retriever.tree.origin
        name = self.tokenizer or origin.tokenizer
        if name is None:
            raise ValueError(
                f"tree {self.tree!r} does not say which tokenizer cuts windows; expected one. Set tokenizer."
            )
        tokenizer = load_fast_tokenizer(name)
        remaining = iter(data or ())
        while batch := list(itertools.islice(remaining, _DOCUMENTS)):
            with self.track_time(unit="batch"):
                documents = [Document(number, document.text) for number, document in enumerate(batch)]
                for row in document_paths(retriever, tokenizer, documents, origin.window_tokens or 2048, self.blocked):
                    batch[row["document"]].metadata |= {"memory_ids": row["memory_ids"], "windows": row["windows"]}
            for document in batch:
                self.stat_update("with a path" if "memory_ids" in document.metadata else "blank")
                yield document
