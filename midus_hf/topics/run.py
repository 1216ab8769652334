"""Commands behind `midus cluster build` and `grow`: from a corpus to a folder with a tree."""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.config.wording import install_extra
from midus_hf.topics.building import (
    BuiltTree,
    LevelFiles,
    TreeOptions,
    build_tree,
    calibrate,
    grow_tree,
    held_out_rows,
    topic_tree,
)
from midus_hf.topics.corpus import read_corpus
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.known_topics import NAMES_FILE, TopicNames
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.tree_files import CENTROIDS_FILE, RECORD_FILE, TreeOrigin, lasting_name
from midus_hf.topics.windows import (
    StoredWindows,
    cut_windows,
    load_fast_tokenizer,
    map_array,
    only_run,
    open_windows,
    store_windows,
    write_array,
)

# Subfolder of a tree's folder for the embeddings of the corpus.
WINDOWS = "windows"

_LEAVES = "leaves.npy"
# Subfolder of `WINDOWS` that keeps finished levels until the tree is complete.
_FINISHED = "clustering"

# Version of the computation that turns embeddings and options into centroids.
_VERSION = 2


def build(
    corpus: str,
    column: str = "text",
    *,
    embedding_model: str,
    tokenizer: str,
    output: Path,
    options: TreeOptions | None = None,
    window_tokens: int = 2048,
    max_tokens: int | None = None,
    device: str = "cpu",
    batch_size: int = 64,
    dtype: str = "float32",
    topic_columns: Sequence[str] = (),
    overwrite: bool = False,
) -> ClusterTree:
    """Embed a corpus, cluster it and write the tree: `tree.safetensors`, `tree.json`, and `windows/` with the embeddings.

    After an interruption, another run keeps the embeddings and the finished levels that are there.

    Args:
        corpus: File, folder or dataset id of the documents, as in `midus_hf.topics.corpus.read_corpus`.
        column: Column that holds their text. Default: `"text"`.
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
        topic_columns: Columns with the names of topics, from the first level down, which are the nodes; of `options`, the seed
            alone is taken then. Default: none, topics are clusters.
        overwrite: Whether a tree in `output` may be replaced. Embeddings of the same request are kept. Default: false.

    Raises:
        ValueError: If the output holds a tree or other files, scikit-learn is not installed, or a function that is
            called refuses the request, such as `store_windows` or `build_tree`.
    """
    from tqdm import tqdm

    check_scikit_learn()
    output, options = output.expanduser(), options or TreeOptions()
    _check_output(output, overwrite)
    cutter = load_fast_tokenizer(tokenizer)
    documents = read_corpus(corpus, text_column=column)
    topics = TopicNames.from_rows(documents, topic_columns) if topic_columns else None
    if topics is not None:  # which checks their number
        options = TreeOptions(topics.branching, len(topic_columns), samples=2 * topics.branching, seed=options.seed)
    embedder = TextEmbedder(embedding_model, device, batch_size, max_tokens)
    stored = store_windows(output / WINDOWS, documents, corpus, column, cutter, embedder, window_tokens, dtype)
    origin = TreeOrigin(
        embedding_model=lasting_name(embedding_model),
        embedding_fingerprint=embedder.fingerprint,
        embedding_max_tokens=embedder.max_tokens,
        tokenizer=lasting_name(tokenizer),
        window_tokens=window_tokens,
        seed=options.seed,
    )
    settings = json.dumps([_VERSION, stored.fingerprint, dataclasses.asdict(options)])
    finished = LevelFiles(output / WINDOWS / _FINISHED, hashlib.sha256(settings.encode()).hexdigest())
    rows = len(stored.documents)
    with only_run(output / WINDOWS):
        held_out = held_out_rows(rows, options.seed)
        if topics is not None:
            paths = topics.paths(documents)[stored.documents]
            built = topic_tree(stored.embeddings, paths, options.branching, origin, held_out)
        else:
            with tqdm(desc="clustering", unit=" rows", total=rows * options.levels, disable=None) as bar:
                built = build_tree(stored.embeddings, options, origin, bar.update, finished, held_out)
        _calibrate(built.tree, documents[column], cutter, embedder, window_tokens, held_out, options.seed)
        _write(output, built, topics)
        finished.delete()
    return built.tree


def grow(
    tree: Path, corpus: str, output: Path, column: str = "text", device: str = "cpu", batch_size: int = 64
) -> ClusterTree:
    """Embed a corpus, and write the tree that has new nodes for its windows that are near no topic of a tree.

    Old nodes keep their numbers, so banks that were trained with the old tree work with the grown one. Windows are cut and
    embedded as for the old tree. `windows/` of the grown tree has the new corpus's windows.

    Args:
        tree: Folder of the tree, which stays as it is.
        corpus: File, folder or dataset id of the documents, as in `midus_hf.topics.corpus.read_corpus`.
        output: Folder of the grown tree.
        column: Column, or JSON key, that holds their text. Default: `"text"`.
        device: Device of the embedding model. Default: `"cpu"`.
        batch_size: Texts per forward pass. Default: 64.

    Raises:
        ValueError: If the tree does not say how it was built, the output holds a tree or other files, all windows are near a
            topic of the tree, or in the cases of `build`.
    """
    check_scikit_learn()
    output = output.expanduser()
    _check_output(output, overwrite=False)
    documents = read_corpus(corpus, text_column=column)
    retriever = MemoryRetriever.load(tree, device, batch_size)
    old, embedder, origin = retriever.tree, retriever.embedder, retriever.tree.origin
    if origin.tokenizer is None:
        raise ValueError(
            f"tree {str(tree)!r} does not say how windows are cut; expected a tree that 'midus cluster build' made."
        )
    tokenizer = load_fast_tokenizer(origin.tokenizer)
    tokens = origin.window_tokens or 2048
    stored = store_windows(output / WINDOWS, documents, corpus, column, tokenizer, embedder, tokens)
    options = TreeOptions(old.branching, old.levels, seed=origin.seed or 0)
    with only_run(output / WINDOWS):
        held_out = held_out_rows(len(stored.documents), options.seed)
        built = grow_tree(old, stored.embeddings, options, held_out=held_out)
        _calibrate(built.tree, documents[column], tokenizer, embedder, tokens, held_out, options.seed)
        _write(output, built)
    return built.tree


def _calibrate(
    tree: ClusterTree,
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    embedder: TextEmbedder,
    window_tokens: int,
    held_out: np.ndarray | None,
    seed: int,
) -> None:
    """Set a tree's least similarity by the texts of the windows that were held out, if any were."""
    if held_out is not None:
        windows = cut_windows(texts, tokenizer, window_tokens)
        apart = [window.text for window, is_held_out in zip(windows, held_out, strict=True) if is_held_out]
        calibrate(tree, apart, embedder.embed, seed)


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


def _write(output: Path, built: BuiltTree, topics: TopicNames | None = None) -> None:
    """Write a tree, the leaf of each of its windows, and the names of its nodes if they have some."""
    # Otherwise a kill further down could leave an old tree with new leaves.
    (output / RECORD_FILE).unlink(missing_ok=True)
    (output / WINDOWS / NAMES_FILE).unlink(missing_ok=True)
    if topics is not None:
        topics.save(output / WINDOWS)
    write_array(output / WINDOWS / _LEAVES, built.leaves.astype(np.int32))
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
    # A build that was killed between the two files of a tree leaves its folder of finished levels behind. The folder shows
    # that the centroids are the build's own.
    own_names = {WINDOWS, CENTROIDS_FILE} if (output / WINDOWS / _FINISHED).is_dir() else {WINDOWS}
    if output.is_dir() and any(
        path.name not in own_names and not path.name.startswith(".") for path in output.iterdir()
    ):
        raise ValueError(
            f"output is {str(output)!r}, which holds other files than those of a tree; expected a new folder. Name another."
        )
