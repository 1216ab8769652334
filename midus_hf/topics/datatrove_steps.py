"""The step of a datatrove pipeline that finds the paths of documents, in parallel tasks. Requires datatrove."""

import itertools
from collections.abc import Iterator
from typing import Any

from datatrove.pipeline.base import PipelineStep

from midus_hf.topics.assigning import document_paths, path_columns
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.windows import cutter_of

# Number of documents that are taken from the previous step at a time.
_DOCUMENTS = 256


class AssignPaths(PipelineStep):
    """Pipeline step that adds each document's path in a tree to its metadata, like `midus cluster assign`.

    The keys are `memory_ids`, `memory_tree` and `windows`. The tree and its model are loaded when the step begins to
    run, in the process that runs it. Blank documents are passed on unchanged.

    Args:
        tree: Folder that `midus cluster build` wrote.
        device: Device of the model.
        batch_size: Texts per forward pass.
    """

    name = "paths in a tree of topics"
    type = "clusters"

    def __init__(self, tree: str, device: str = "cpu", batch_size: int = 64):
        super().__init__()
        self.tree, self.device, self.batch_size = tree, device, batch_size

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents of the previous step with their paths, in the same order; `rank` and `world_size` are ignored.

        Raises:
            ValueError: If `MemoryRetriever.load` refuses the tree, or it names no tokenizer that can be loaded.
        """
        retriever = MemoryRetriever.load(self.tree, self.device, self.batch_size)
        tokenizer, tokens = cutter_of(retriever.tree, self.tree)
        remaining = iter(data or ())
        while batch := list(itertools.islice(remaining, _DOCUMENTS)):
            with self.track_time(unit="batch"):
                texts = [document.text for document in batch]
                for number, windows in document_paths(retriever, tokenizer, texts, tokens):
                    batch[number].metadata |= path_columns(windows, retriever.tree)
            for document in batch:
                self.stat_update("with a path" if "memory_ids" in document.metadata else "blank")
                yield document
