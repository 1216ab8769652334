"""Steps for pipelines of datatrove, which read, filter and write corpora on many machines. Needs the package datatrove.

`EmbedWindows` runs as many tasks, `BuildTree` joins what they have written, and `AssignPaths` runs as many tasks again. For a corpus
that takes long to cluster, `ClusterLevel` and `AssignWindows` do the work of `BuildTree` before it, level by level.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from midus_hf.clusters.assigning import document_paths
from midus_hf.clusters.building import TreeOptions
from midus_hf.clusters.corpus import Document, load_fast_tokenizer
from midus_hf.clusters.run import assign_windows, build_from_embeddings, cluster_level_from_embeddings
from midus_hf.clusters.window_shards import task_folder
from midus_hf.clusters.window_writer import WindowWriter, only_run, windows_request
from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.memory_retriever import MemoryRetriever
from midus_hf.retrieval.tree_files import lasting_name

_DOCUMENTS = 256
"""Documents that are taken from the step before at a time."""


class EmbedWindows(PipelineStep):
    """Embeds the windows of the documents of each task into a folder of the task's own; it is the last step, and passes nothing on.

    A task that was interrupted goes on with the stretch that it was at and ends in the same bytes, if it is given the same documents
    again: as many tasks, and the same steps before. Other documents are refused. Documents that hold nothing but white space are
    left out.

    Args:
        output: Folder of all tasks, which all of them can write to, and `BuildTree` can map.
        embedding_model: As in `TextEmbedder`.
        tokenizer: Folder or hub id of the tokenizer that cuts windows.
        window_tokens: Tokens of a window. Default: 2048.
        max_tokens: As in `TextEmbedder`. Default: None.
        device: As in `TextEmbedder`. Default: `"cpu"`.
        batch_size: As in `TextEmbedder`. Default: 64.
        dtype: What embeddings are kept as. Default: `"float32"`.
        label_key: Where the metadata of documents has gold labels. Default: None, there are none.
        source_key: Where the metadata has the file of rows that a document is from, `"file_path"` for readers of files. Windows are
            then joined in the order of these files, and the embeddings of a file depend on no other, so that the tree is the same
            for any number of tasks. Not for documents that came with a `file_path` of their own, such as that of a web archive: a
            stretch ends wherever it changes. Default: None, windows are joined in the order of tasks.
    """

    name = "embeddings of windows"
    type = "clusters"

    def __init__(
        self,
        output: str,
        embedding_model: str,
        tokenizer: str,
        window_tokens: int = 2048,
        max_tokens: int | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        dtype: str = "float32",
        label_key: str | None = None,
        source_key: str | None = None,
    ):
        super().__init__()
        self.output, self.embedding_model, self.tokenizer = output, embedding_model, tokenizer
        self.window_tokens, self.max_tokens, self.dtype = window_tokens, max_tokens, dtype
        self.device, self.batch_size = device, batch_size
        self.label_key, self.source_key = label_key, source_key

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Embed the documents of the step before.

        Args:
            data: Its documents.
            rank: Of the task. Default: 0.
            world_size: Tasks. Default: 1.

        Raises:
            ValueError: As `load_fast_tokenizer` and `TextEmbedder`; if the folder holds windows of another request, of other
                documents or of another number of tasks, or is being written; or if a document lacks its label or source.
        """
        tokenizer = load_fast_tokenizer(self.tokenizer)
        embedder = TextEmbedder(self.embedding_model, self.device, self.batch_size, self.max_tokens)
        request = {
            **windows_request(tokenizer, embedder, self.window_tokens, self.dtype),
            "label_column": self.label_key,
            "source_key": self.source_key,
            "tasks": world_size,
            "rank": rank,
            "embedding_model_name": lasting_name(self.embedding_model),
            "tokenizer_name": lasting_name(self.tokenizer),
        }
        folder = task_folder(Path(self.output).expanduser(), rank)
        with only_run(folder):
            writer = WindowWriter(folder, request, keep_sources=True)
            if not writer.record.complete:
                before = writer.record.windows
                for record in writer.write(self._documents(data), tokenizer, embedder):
                    self.stat_update("windows", value=record.windows - before)
                    before = record.windows
                writer.finish()

    def _documents(self, data: Any) -> Iterator[Document]:
        visible = (document for document in data or () if document.text.strip())
        for number, document in enumerate(visible):
            label, source = (_metadata(document, key) for key in (self.label_key, self.source_key))
            yield Document(number, document.text, label, source)


class BuildTree(PipelineStep):
    """Builds the tree of what `EmbedWindows` has written, as `midus cluster build --embeddings` does; a pipeline of its own.

    One task does it, and others do nothing. It goes on after an interruption with the node that it was at, and after `ClusterLevel`
    and `AssignWindows` with the level that they have not done.

    Args:
        embeddings: The output of `EmbedWindows`.
        output: Folder of the tree.
        options: How it is built. Default: `TreeOptions()`.
    """

    name = "a tree of topics"
    type = "clusters"

    def __init__(self, embeddings: str, output: str, options: TreeOptions | None = None):
        super().__init__()
        self.embeddings, self.output, self.options = embeddings, output, options or TreeOptions()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Build it.

        Args:
            data: Not used. Default: None.
            rank: Of the task; the first one builds. Default: 0.
            world_size: Tasks; not used. Default: 1.

        Raises:
            ValueError: As `build_from_embeddings`.
        """
        if rank == 0:
            build_from_embeddings(Path(self.embeddings), Path(self.output), self.options)


class ClusterLevel(PipelineStep):
    """Finds the centroids of one level of a tree of what `EmbedWindows` has written; a pipeline of its own.

    One task does it, and others do nothing: it reads the windows that it draws. `AssignWindows`, in as many tasks as there are, then
    assigns all windows to the nodes of the level, and so on level by level. `BuildTree` comes last and finds everything done. The
    tree is the one that `BuildTree` makes alone, bit for bit.

    Args:
        embeddings: The output of `EmbedWindows`.
        output: Folder of the tree.
        level: From 1. Those above it must be assigned.
        options: How the tree is built. Default: `TreeOptions()`.
    """

    name = "centroids of a level"
    type = "clusters"

    def __init__(self, embeddings: str, output: str, level: int, options: TreeOptions | None = None):
        super().__init__()
        self.embeddings, self.output, self.level, self.options = embeddings, output, level, options or TreeOptions()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Find them.

        Args:
            data: Not used. Default: None.
            rank: Of the task; the first one does it. Default: 0.
            world_size: Tasks; not used. Default: 1.

        Raises:
            ValueError: As `cluster_level_from_embeddings`.
        """
        if rank == 0:
            cluster_level_from_embeddings(Path(self.embeddings), Path(self.output), self.level, self.options)


class AssignWindows(PipelineStep):
    """Assigns the windows of a corpus to the nodes of one level of its tree: each task a share of them, into a file of its own.

    Args:
        output: Folder of the tree, which all tasks can write to.
        level: That `ClusterLevel` has done.
        options: As they were for that. Default: `TreeOptions()`.
    """

    name = "windows to the nodes of a level"
    type = "clusters"

    def __init__(self, output: str, level: int, options: TreeOptions | None = None):
        super().__init__()
        self.output, self.level, self.options = output, level, options or TreeOptions()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Assign the share of a task; what is there already is not done again.

        Args:
            data: Not used. Default: None.
            rank: Of the task. Default: 0.
            world_size: Tasks. Default: 1.

        Raises:
            ValueError: As `assign_windows`.
        """
        self.stat_update(
            "windows", value=assign_windows(Path(self.output), self.level, self.options, rank, world_size)
        )


class AssignPaths(PipelineStep):
    """Gives each document its path in a tree: `memory_ids`, `memory_tree` and `windows` in its metadata, as `midus cluster assign`.

    The tree and its model are loaded when the step begins to run, in the process that runs it. Documents that hold nothing but
    white space pass as they are.

    Args:
        tree: Folder that `midus cluster build` has made.
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
                    of_paths = {key: row[key] for key in ("memory_ids", TREE_COLUMN, "windows")}
                    batch[row["document"]].metadata |= of_paths
            for document in batch:
                self.stat_update("with a path" if "memory_ids" in document.metadata else "blank")
                yield document


def _metadata(document: Any, key: str | None) -> str | None:
    if key is None:
        return None
    found = document.metadata.get(key)
    if not isinstance(found, str | int):
        raise ValueError(
            f"document {document.id!r} has {found!r} as its {key!r}; expected a string or a whole number in its metadata."
        )
    return str(found)
