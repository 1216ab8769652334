"""Commands behind `midus cluster build`: from a corpus, or from embeddings, to a folder with a tree."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from midus_hf.config.wording import install_extra
from midus_hf.files.whole_files import whole_file
from midus_hf.topics.building import (
    BuiltTree,
    TreeOptions,
    assign_rows,
    build_tree,
    calibrate,
    cluster_level,
    grow_tree,
    held_out_rows,
)
from midus_hf.topics.corpus import Corpus, cut_windows, load_fast_tokenizer, read_corpus
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.finished_nodes import FinishedNodes
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.text_files import find_files
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.tree_files import CENTROIDS_FILE, RECORD_FILE, TreeOrigin, lasting_name
from midus_hf.topics.window_store import JoinedRows, StoredWindows, join_shards, open_windows, store_windows
from midus_hf.topics.window_writer import map_array, only_run, read_record

# Subfolder of a tree's folder for the embeddings of the corpus.
WINDOWS = "windows"

_LEAVES = "leaves.npy"
# Subfolder of `WINDOWS` that keeps finished nodes until the tree is complete.
_FINISHED = "clustering"

# Version of the computation that turns embeddings and options into centroids.
_VERSION = 2


@dataclass(frozen=True)
class BuildRequest:
    """Request for `build`: corpus, models, output and options.

    Args:
        corpus: Location and format of the documents.
        embedding_model: Folder or hub id of the embedding model, as in `TextEmbedder`.
        tokenizer: Folder or hub id of the tokenizer that cuts windows.
        output: Folder of the tree.
        options: Options of the tree. Default: `TreeOptions()`.
        window_tokens: Tokens per window. Default: 2048.
        max_tokens: Tokens of a window that the model reads, as in `TextEmbedder`. Default: None, for the model's own
            limit.
        device: Device of the embedding model. Default: `"cpu"`.
        batch_size: Texts per forward pass. Default: 64.
        dtype: Dtype in which embeddings are stored, `"float16"` or `"float32"`. Default: `"float32"`.
        overwrite: Whether a tree in `output` may be replaced. Embeddings of the same request are kept. Default: false.
    """

    corpus: Corpus
    embedding_model: str
    tokenizer: str
    output: Path
    options: TreeOptions = field(default_factory=TreeOptions)
    window_tokens: int = 2048
    max_tokens: int | None = None
    device: str = "cpu"
    batch_size: int = 64
    dtype: str = "float32"
    overwrite: bool = False


def build(request: BuildRequest) -> ClusterTree:
    """Embed a corpus, cluster it and write the tree: `tree.safetensors`, `tree.json`, and `windows/` with the embeddings.

    After an interruption, another run keeps the embeddings that are there, and resumes with the node that was being
    clustered.

    Raises:
        ValueError: If the output holds a tree or other files, scikit-learn is not installed, or a function that is
            called refuses the request, such as `store_windows` or `build_tree`.
    """
    check_scikit_learn()
    output = request.output.expanduser()
    _check_output(output, request.overwrite)
    find_files(request.corpus.path)  # raises an error for a missing corpus before models are loaded
    tokenizer = load_fast_tokenizer(request.tokenizer)
    embedder = TextEmbedder(request.embedding_model, request.device, request.batch_size, request.max_tokens)
    stored = store_windows(output / WINDOWS, request.corpus, tokenizer, embedder, request.window_tokens, request.dtype)
    origin = TreeOrigin(
        embedding_model=lasting_name(request.embedding_model),
        embedding_fingerprint=embedder.fingerprint,
        embedding_max_tokens=embedder.max_tokens,
        tokenizer=lasting_name(request.tokenizer),
        window_tokens=request.window_tokens,
        seed=request.options.seed,
    )
    return _cluster(
        output, stored, request.options, origin, _Texts(request.corpus, tokenizer, embedder, request.window_tokens)
    )


@dataclass(frozen=True)
class _Texts:
    """The texts of stored windows, from which a tree's least similarity is measured."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    embedder: TextEmbedder
    window_tokens: int

    def of_rows(self, rows: np.ndarray) -> list[str]:
        """Return the texts of windows."""
        wanted = set(np.flatnonzero(rows).tolist())
        windows = cut_windows(read_corpus(self.corpus), self.tokenizer, self.window_tokens)
        return [window.text for number, window in enumerate(windows) if number in wanted]


def grow(tree: Path, corpus: Corpus, output: Path, device: str = "cpu", batch_size: int = 64) -> ClusterTree:
    """Embed a corpus, and write the tree that has new nodes for its windows that are near no topic of a tree.

    Old nodes keep their numbers, so banks that were trained with the old tree work with the grown one. Windows are cut and
    embedded as for the old tree. `windows/` of the grown tree has the new corpus's windows.

    Args:
        tree: Folder of the tree, which stays as it is.
        corpus: Location and format of the documents.
        output: Folder of the grown tree.
        device: Device of the embedding model. Default: `"cpu"`.
        batch_size: Texts per forward pass. Default: 64.

    Raises:
        ValueError: If the tree does not say how it was built, the output holds a tree or other files, all windows are near a
            topic of the tree, or in the cases of `build`.
    """
    check_scikit_learn()
    output = output.expanduser()
    _check_output(output, overwrite=False)
    old = ClusterTree.load(tree)
    origin = old.origin
    if origin.embedding_model is None or origin.tokenizer is None:
        raise ValueError(
            f"tree {str(tree)!r} does not say by which model and tokenizer it was built; expected one that build made."
        )
    tokenizer = load_fast_tokenizer(origin.tokenizer)
    embedder = TextEmbedder(origin.embedding_model, device, batch_size, origin.embedding_max_tokens)
    MemoryRetriever(old, embedder)  # refuses another model under the old name
    tokens = origin.window_tokens or 2048
    stored = store_windows(output / WINDOWS, corpus, tokenizer, embedder, tokens)
    options = TreeOptions(old.branching, old.levels, seed=origin.seed or 0)
    with only_run(output / WINDOWS):
        held_out = held_out_rows(len(stored.documents), options.seed)
        built = grow_tree(old, stored.embeddings, options, held_out=held_out)
        if held_out is not None:
            texts = _Texts(corpus, tokenizer, embedder, tokens).of_rows(held_out)
            calibrate(built.tree, texts, embedder.embed, options.seed)
        _write(output, built)
    return built.tree


def build_from_embeddings(
    embeddings: Path, output: Path, options: TreeOptions | None = None, overwrite: bool = False
) -> ClusterTree:
    """Cluster the windows that the tasks of a pipeline have embedded, and write the tree. No model is loaded.

    The embeddings are not copied to `windows/` but read where they are. After an interruption, another run resumes with
    the node that was being clustered.

    Args:
        embeddings: Folder that `midus_hf.topics.datatrove_steps.EmbedWindows` wrote.
        output: Folder of the tree.
        options: Options of the tree. Default: `TreeOptions()`.
        overwrite: Whether a tree in `output` may be replaced. Default: false.

    Raises:
        ValueError: If a task is not complete, or in the cases of `build`.
    """
    check_scikit_learn()
    options = options or TreeOptions()
    output = output.expanduser()
    stored = _joined_windows(embeddings, output, overwrite)
    record = read_record(output / WINDOWS)
    assert record is not None
    made_with = record.request
    origin = TreeOrigin(
        embedding_model=made_with["embedding_model_name"],
        embedding_fingerprint=made_with["embedding_model"],
        embedding_max_tokens=made_with["max_tokens"],
        tokenizer=made_with["tokenizer_name"],
        window_tokens=made_with["window_tokens"],
        seed=options.seed,
    )
    return _cluster(output, stored, options, origin)


def cluster_level_from_embeddings(embeddings: Path, output: Path, level: int, options: TreeOptions) -> None:
    """Compute and store the centroids of one level, from 1, of the tree that `build_from_embeddings` will build.

    Raises:
        ValueError: In the cases of `build_from_embeddings`; if the tree lacks the level, or windows are not assigned in the
            level above.
    """
    check_scikit_learn()
    _check_level(level, options)
    output = output.expanduser()
    stored = _joined_windows(embeddings, output, overwrite=False)
    with only_run(output / WINDOWS), contextlib.closing(_finished(output, stored, options)) as finished:
        cluster_level(
            stored.embeddings,
            options,
            level,
            _nodes_above(finished, level, len(stored.documents)),
            finished,
            held_out_rows(len(stored.documents), options.seed),
        )


def assign_windows(output: Path, level: int, options: TreeOptions, rank: int, tasks: int) -> int:
    """Assign share `rank` of `tasks` shares of a tree's windows to the nodes of a level, and return the number of windows.

    Other processes may assign other shares at the same time. A share that was assigned before counts 0.

    Raises:
        ValueError: If the tree lacks the level, or `cluster_level_from_embeddings` has not computed the level's centroids.
    """
    _check_level(level, options)
    output = output.expanduser()
    stored = open_windows(output / WINDOWS)
    count = len(stored.documents)
    first, end = (count * number // tasks for number in (rank, rank + 1))
    with contextlib.closing(_finished(output, stored, options, read_only=True)) as finished:
        if first == end or finished.has_part(level, first, end) or finished.nodes(level) is not None:
            return 0
        nodes = _nodes_above(finished, level, count)[first:end]
        child_centroids = torch.full((options.branching**level, stored.embeddings.shape[1]), torch.nan)
        for parent in np.unique(nodes).tolist():
            centroids = finished.centroids(level, parent)
            if centroids is None:
                raise ValueError(
                    f"folder {str(output)!r} has no centroids of level {level} below node {parent}; expected the centroids that "
                    "ClusterLevel computes. Run it first."
                )
            child_centroids[options.branching * parent : options.branching * parent + len(centroids)] = centroids
        finished.add_part(
            level, first, assign_rows(stored.embeddings, first, nodes, child_centroids, options.branching)
        )
    return end - first


def _check_level(level: int, options: TreeOptions) -> None:
    if not 1 <= level <= options.levels:
        raise ValueError(f"level is {level}; expected a level of the tree, from 1 to {options.levels}.")


def _nodes_above(finished: FinishedNodes, level: int, count: int) -> np.ndarray:
    """Return the node of each window in the level above, `[N]`, int64."""
    nodes = np.zeros(count, np.int64) if level == 1 else finished.nodes(level - 1)
    if nodes is None:
        raise ValueError(
            f"windows are not all assigned to nodes of level {level - 1}; expected the parts of all tasks. Run AssignWindows of that "
            "level first."
        )
    return nodes


def _joined_windows(embeddings: Path, output: Path, overwrite: bool) -> StoredWindows:
    """Join the windows of all tasks in the folder of a tree, and return them."""
    embeddings = embeddings.expanduser()
    _check_output(output, overwrite)
    len(JoinedRows(embeddings))  # raises an error if a task is incomplete, before anything is written
    with only_run(output / WINDOWS):
        join_shards(embeddings, output / WINDOWS)
    return open_windows(output / WINDOWS)


def _finished(output: Path, stored: StoredWindows, options: TreeOptions, read_only: bool = False) -> FinishedNodes:
    """Return the finished nodes of the tree with these windows and options."""
    rows, width = stored.embeddings.shape
    settings = json.dumps([_VERSION, stored.fingerprint, dataclasses.asdict(options)])
    fingerprint = hashlib.sha256(settings.encode()).hexdigest()
    return FinishedNodes(output / WINDOWS / _FINISHED, fingerprint, options.branching, width, rows, read_only)


def open_build(folder: Path) -> tuple[ClusterTree, StoredWindows, np.ndarray]:
    """Read the tree and the windows that `build` wrote.

    Args:
        folder: Output folder of `build`.

    Returns:
        The tree; the windows; the leaf of each window, `[N]`, int32, memory-mapped.

    Raises:
        ValueError: If a file is missing or was altered.
    """
    folder = folder.expanduser()
    tree = ClusterTree.load(folder)
    stored = open_windows(folder / WINDOWS)
    leaves = map_array(folder / WINDOWS / _LEAVES, len(stored.documents), "Build the tree again with --overwrite.")
    return tree, stored, leaves


def _cluster(
    output: Path, stored: StoredWindows, options: TreeOptions, origin: TreeOrigin, texts: _Texts | None = None
) -> ClusterTree:
    """Cluster windows, and write the tree and the leaf of each window."""
    from tqdm import tqdm

    rows = len(stored.documents)
    with only_run(output / WINDOWS):
        finished = _finished(output, stored, options)
        with (
            contextlib.closing(finished),
            tqdm(desc="clustering", unit=" rows", total=rows * options.levels, disable=None) as bar,
        ):
            held_out = held_out_rows(rows, options.seed)
            built = build_tree(stored.embeddings, options, origin, bar.update, finished, held_out)
            if texts is not None and held_out is not None:
                calibrate(built.tree, texts.of_rows(held_out), texts.embedder.embed, options.seed)
        _write(output, built)
        finished.delete()
    return built.tree


def _write(output: Path, built: BuiltTree) -> None:
    """Write a tree, and the leaf of each of its windows."""
    # Otherwise a kill further down could leave an old tree with new leaves.
    (output / RECORD_FILE).unlink(missing_ok=True)
    with whole_file(output / WINDOWS / _LEAVES) as partial, partial.open("wb") as file:
        np.save(file, built.leaves.astype(np.int32))
    built.tree.save(output)


def check_scikit_learn() -> None:
    """Raise an error, before any work, if scikit-learn is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(f"clustering needs scikit-learn; {install_extra('clusters')}.")


def _check_output(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {str(output)!r}, which is a file; expected a folder to make. Name another.")
    if (output / RECORD_FILE).exists():
        if not overwrite:
            raise ValueError(
                f"output {str(output)!r} holds a tree; pass --overwrite to replace it, which keeps the embeddings, or choose "
                "another folder."
            )
        return
    # A build that was killed between the two files of a tree leaves its folder of finished nodes behind. The folder shows
    # that the centroids are the build's own.
    own_names = {WINDOWS, CENTROIDS_FILE} if (output / WINDOWS / _FINISHED).is_dir() else {WINDOWS}
    if output.is_dir() and any(
        path.name not in own_names and not path.name.startswith(".") for path in output.iterdir()
    ):
        raise ValueError(
            f"output is {str(output)!r}, which holds other files than those of a tree; expected a new folder. Name another."
        )
