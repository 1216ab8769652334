"""Step of a datatrove pipeline that finds the paths of documents in parallel; requires datatrove."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from midus_hf.topics.document_paths import TopicNames, document_paths, path_columns
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.run import WINDOWS
from midus_hf.topics.windows import load_window_tokenizer

_DOCUMENTS = 256  # number of documents that are taken from the previous step at a time


class AssignPaths(PipelineStep):
    """Pipeline step that adds each document's path in a tree to its metadata, like `midus cluster assign`.

    In a tree of named topics, documents with these names in their metadata get the paths of their topics. The keys are `memory_ids`,
    `memory_tree` and `windows`. The process that runs the step loads the tree and its model. Blank documents are passed on unchanged.

    Args:
        tree: Folder that `midus cluster build` wrote.
        device: Device of the model.
        batch_size: Texts per forward pass.
    """

    name = "paths in a tree of topics"
    type = "clusters"

    def __init__(self, tree: str, device: str = "cpu", batch_size: int = 64):
        super().__init__()
        self.tree = tree
        self.device = device
        self.batch_size = batch_size

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents of the previous step with their paths, in the same order.

        Raises:
            RequestError: If `MemoryRetriever.load` refuses the tree, its tokenizer cannot be loaded, or a document has a topic that
                the tree does not know.
        """
        retriever = MemoryRetriever.load(self.tree, self.device, self.batch_size)
        tokenizer, tokens = load_window_tokenizer(retriever.tree, self.tree)
        topics = TopicNames.load(Path(self.tree).expanduser() / WINDOWS)
        remaining = iter(data or ())
        while batch := list(itertools.islice(remaining, _DOCUMENTS)):
            with self.track_time(unit="batch"):
                named: list[Any] = []
                others: list[Any] = []
                for document in batch:
                    columns = document.metadata.keys() if document.text.strip() else ()
                    is_named = topics is not None and {*topics.columns}.issubset(columns)
                    (named if is_named else others).append(document)
                if topics is not None:
                    names = {column: [each.metadata[column] for each in named] for column in topics.columns}
                    for document, path in zip(
                        named, topics.paths(names, "a batch of documents").tolist(), strict=True
                    ):
                        document.metadata |= path_columns([path], retriever.tree)
                texts = [document.text for document in others]
                for number, windows in document_paths(retriever, tokenizer, texts, tokens):
                    others[number].metadata |= path_columns(windows, retriever.tree)
            for document in batch:
                path = document.metadata.get("memory_ids")
                self.stat_update("blank" if path is None else "with a path")
                if path is not None and path[0] < 0:
                    self.stat_update("without a topic")
                yield document
