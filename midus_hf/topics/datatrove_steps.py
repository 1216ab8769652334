"""Steps for pipelines of datatrove, which process corpora on many machines. Requires the package datatrove.

`EmbedWindows` runs in many tasks, `BuildTree` joins what they have written, and `AssignPaths` again runs in many tasks.
For a corpus that takes long to cluster, `ClusterLevel` and `AssignWindows` can do the work of `BuildTree` beforehand,
level by level.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.topics.assigning import document_paths
from midus_hf.topics.building import TreeOptions
from midus_hf.topics.corpus import Document, load_fast_tokenizer
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.run import assign_windows, build_from_embeddings, cluster_level_from_embeddings
from midus_hf.topics.tree_files import lasting_name
from midus_hf.topics.window_store import task_folder
from midus_hf.topics.window_writer import WindowWriter, only_run, windows_request

# Number of documents that are taken from the previous step at a time.
_DOCUMENTS = 256


class EmbedWindows(PipelineStep):
    """Pipeline step that embeds the windows of each task's documents into a folder per task. It must be the last step.

    An interrupted task resumes with the stretch of windows that it was at, if it gets the same documents again: the
    number of tasks and the previous steps must be the same. Its files then have the same bytes as without the
    interruption. Other documents are refused. Blank documents are left out.

    Args:
        output: Folder of all tasks. All tasks must be able to write to it, and `BuildTree` must be able to memory-map
            it.
        embedding_model: Folder or hub id of the embedding model, as in `TextEmbedder`.
        tokenizer: Folder or hub id of the tokenizer that cuts windows.
        window_tokens: Tokens per window. Default: 2048.
        max_tokens: Tokens of a window that the model reads, as in `TextEmbedder`. Default: None, for the model's own
            limit.
        device: Device of the model. Default: `"cpu"`.
        batch_size: Texts per forward pass. Default: 64.
        dtype: Dtype in which embeddings are stored, `"float16"` or `"float32"`. Default: `"float32"`.
        label_key: Key of gold labels in the documents' metadata. Default: None; there are no labels.
        source_key: Key, in the metadata, of the file of rows that contains a document: `"file_path"` for datatrove's
            readers of files. Windows are then joined in the order of these files, and the embeddings of a file depend
            on no other file, so the tree does not depend on the number of tasks. Do not use it for documents that bring
            their own `file_path`, such as those from a web archive: each change of the value ends a stretch. Default:
            None; windows are joined in the order of tasks.
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
        """Embed the documents of the previous step, as task `rank` of `world_size` tasks.

        Raises:
            ValueError: If `load_fast_tokenizer` or `TextEmbedder` refuses its arguments; if the folder holds windows of another
                request, of other documents or of another number of tasks; if another run is writing to the folder; or if a
                document lacks its label or source.
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
                windows_before = writer.record.windows
                for record in writer.write(self._documents(data), tokenizer, embedder):
                    self.stat_update("windows", value=record.windows - windows_before)
                    windows_before = record.windows
                writer.finish()

    def _documents(self, data: Any) -> Iterator[Document]:
        visible = (document for document in data or () if document.text.strip())
        for number, document in enumerate(visible):
            label, source = (_metadata(document, key) for key in (self.label_key, self.source_key))
            yield Document(number, document.text, label, source)


class _OneTask(PipelineStep):
    """Pipeline step, in a separate pipeline, of which only the first task works."""

    type = "clusters"

    def __init__(self, embeddings: str, output: str, options: TreeOptions | None):
        super().__init__()
        self.embeddings, self.output, self.options = Path(embeddings), Path(output), options or TreeOptions()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Run the step in the task of rank 0 only; `data` and `world_size` are ignored."""
        if rank == 0:
            self._work()

    def _work(self) -> None:
        raise NotImplementedError


class BuildTree(_OneTask):
    """Pipeline step, in a separate pipeline, that builds the tree from the embeddings that `EmbedWindows` wrote.

    The step does what `midus cluster build --embeddings` does. Only the first task works. After an interruption the
    step resumes with the node that it was at, and after `ClusterLevel` and `AssignWindows` with the first level that
    they have not done.

    Args:
        embeddings: Output folder of `EmbedWindows`.
        output: Folder of the tree.
        options: Options of the tree. Default: `TreeOptions()`.
    """

    name = "a tree of topics"

    def __init__(self, embeddings: str, output: str, options: TreeOptions | None = None):
        super().__init__(embeddings, output, options)

    def _work(self) -> None:
        build_from_embeddings(self.embeddings, self.output, self.options)


class ClusterLevel(_OneTask):
    """Pipeline step, in a separate pipeline, that computes the centroids of one level from what `EmbedWindows` wrote.

    Only the first task works, and reads only the windows that it samples. `AssignWindows`, in any number of tasks, then
    assigns all windows to the nodes of the level. The two steps are repeated for each level. `BuildTree` comes last and
    writes the tree, which equals, bit for bit, the tree that `BuildTree` builds alone.

    Args:
        embeddings: Output folder of `EmbedWindows`.
        output: Folder of the tree.
        level: The level, from 1. Windows must be assigned to the nodes of the levels above.
        options: Options of the tree. Default: `TreeOptions()`.
    """

    name = "centroids of a level"

    def __init__(self, embeddings: str, output: str, level: int, options: TreeOptions | None = None):
        super().__init__(embeddings, output, options)
        self.level = level

    def _work(self) -> None:
        cluster_level_from_embeddings(self.embeddings, self.output, self.level, self.options)


class AssignWindows(PipelineStep):
    """Pipeline step that assigns the windows of a corpus to the nodes of one level, in any number of tasks.

    Each task assigns its share of the windows, and writes a separate file.

    Args:
        output: Folder of the tree, to which all tasks must be able to write.
        level: A level that `ClusterLevel` has done, from 1.
        options: Options of the tree, as `ClusterLevel` had them. Default: `TreeOptions()`.
    """

    name = "windows to the nodes of a level"
    type = "clusters"

    def __init__(self, output: str, level: int, options: TreeOptions | None = None):
        super().__init__()
        self.output, self.level, self.options = output, level, options or TreeOptions()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Assign the share of task `rank` of `world_size` tasks, unless that was done before; `data` is ignored."""
        assigned = assign_windows(Path(self.output), self.level, self.options, rank, world_size)
        self.stat_update("windows", value=assigned)


class AssignPaths(PipelineStep):
    """Pipeline step that adds each document's path in a tree to its metadata, like `midus cluster assign`.

    The keys are `memory_ids`, `memory_tree` and `windows`. The tree and its model are loaded when the step begins to
    run, in the process that runs it. Blank documents are passed on unchanged.

    Args:
        tree: Folder that `midus cluster build` wrote.
        embedding_model: Folder or hub id of the tree's embedding model. Default: the model recorded in the tree.
        tokenizer: Folder or hub id of the tokenizer that cuts windows. Default: the tokenizer recorded in the tree.
        device: Device of the model. Default: `"cpu"`.
        batch_size: Texts per forward pass. Default: 64.
        blocked: Pairs of level and node that no path may take, as in `ClusterTree.paths`. Default: none.
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
        """Yield the documents of the previous step with their paths, in the same order; `rank` and `world_size` are ignored.

        Raises:
            ValueError: If `MemoryRetriever.load` or `load_fast_tokenizer` refuses its arguments, or neither the tree nor
                `tokenizer` names a tokenizer.
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
                    path_columns = {key: row[key] for key in ("memory_ids", TREE_COLUMN, "windows")}
                    batch[row["document"]].metadata |= path_columns
            for document in batch:
                self.stat_update("with a path" if "memory_ids" in document.metadata else "blank")
                yield document


def _metadata(document: Any, key: str | None) -> str | None:
    if key is None:
        return None
    value = document.metadata.get(key)
    if not isinstance(value, str | int):
        raise ValueError(
            f"document {document.id!r} has {value!r} as its {key!r}; expected a string or a whole number in its metadata."
        )
    return str(value)
