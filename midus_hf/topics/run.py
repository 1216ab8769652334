"""The functions of `midus cluster build` and `grow`: from a corpus to a folder with a tree."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from midus_hf.config.errors import RequestError, install_extra, print_note
from midus_hf.data.corpus import read_corpus
from midus_hf.topics.building import (
    BuiltTree,
    TreeOptions,
    build_tree,
    calibrate,
    grow_tree,
    held_out_documents,
    held_out_rows,
    set_topic_limits,
    topic_tree,
)
from midus_hf.topics.document_paths import NAMES_FILE, TopicNames
from midus_hf.topics.memory_retriever import MemoryRetriever, TextEmbedder
from midus_hf.topics.tree import RECORD_FILE, ClusterTree, TreeOrigin, lasting_name
from midus_hf.topics.windows import (
    StoredWindows,
    Window,
    cut_windows,
    load_fast_tokenizer,
    load_window_tokenizer,
    only_run,
    open_windows,
    store_windows,
    write_array,
)

WINDOWS = "windows"  # subfolder of a tree's folder for the embeddings of the corpus
_LEAVES = "leaves.npy"


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
    topic_columns: Sequence[str] = (),
    overwrite: bool = False,
) -> ClusterTree:
    """Embed a corpus, cluster it and write the tree, with the embeddings in `windows/`.

    After an interruption, another run reuses the existing embeddings.

    Args:
        corpus: File, folder or dataset id of the documents, as in `midus_hf.data.corpus.read_corpus`.
        column: Column that holds their text.
        embedding_model: Folder or hub id of the embedding model, as in `TextEmbedder`.
        tokenizer: Folder or hub id of the tokenizer that cuts windows.
        output: Folder of the tree.
        options: Options of the tree. Default: `TreeOptions()`.
        window_tokens: Tokens per window.
        max_tokens: Tokens of a window that the model reads. Default: the model's limit.
        device: Device of the embedding model.
        batch_size: Texts per forward pass.
        topic_columns: Columns with the names of topics, from the first level down, which are the nodes; then only `seed` and
            `topic_quantile` of `options` are used. Default: none, topics are clusters.
        overwrite: Whether a tree in `output` may be replaced. Embeddings of the same request are kept.

    Raises:
        RequestError: If the output holds a tree or other files, scikit-learn is not installed, or `store_windows` or `build_tree`
            refuses.
    """
    from midus_hf.sources.progress import show_progress

    output = _checked_output(output, overwrite)
    options = options or TreeOptions()
    cutter = load_fast_tokenizer(tokenizer)
    documents = read_corpus(corpus, text_column=column)
    topics = TopicNames.from_rows(documents, topic_columns) if topic_columns else None
    if topics is not None:  # which checks their number
        options = TreeOptions(
            topics.branching,
            len(topic_columns),
            samples=2 * topics.branching,
            seed=options.seed,
            topic_quantile=options.topic_quantile,
        )
    embedder = TextEmbedder(embedding_model, device, batch_size, max_tokens)
    stored = store_windows(output / WINDOWS, documents, corpus, column, cutter, embedder, window_tokens)
    origin = TreeOrigin(
        embedding_model=lasting_name(embedding_model),
        embedding_fingerprint=embedder.fingerprint,
        embedding_max_tokens=embedder.max_tokens,
        tokenizer=lasting_name(tokenizer),
        window_tokens=window_tokens,
        seed=options.seed,
        topic_quantile=options.topic_quantile,
    )
    rows = len(stored.documents)
    with only_run(output / WINDOWS):
        measured = held_out_rows(rows, options.seed)
        by_document = held_out_documents(documents[column], stored.documents, options)
        held_out = by_document if measured is None else measured | by_document
        if topics is not None:
            paths = topics.paths(documents)[stored.documents]
            built = topic_tree(stored.embeddings, paths, options.branching, origin, held_out)
        else:
            with show_progress(desc="clustering", unit=" rows", total=rows * options.levels) as bar:
                built = build_tree(stored.embeddings, options, origin, bar.update, held_out)
        windows = cut_windows(documents[column], cutter, window_tokens)
        set_topic_limits(built, stored.embeddings, stored.documents, by_document, options)
        return _finished(output, built, windows, embedder, measured, options.seed, topics)


def grow(
    tree: Path, corpus: str, output: Path, column: str = "text", device: str = "cpu", batch_size: int = 64
) -> ClusterTree:
    """Embed a corpus, and write a tree with new nodes for its windows that are near no topic.

    Old nodes keep their numbers, so banks trained with the old tree work with the grown one. Windows are cut and embedded as for the
    old tree. Old topics keep their limits; new ones get limits by the old tree's quantile. `windows/` of the grown tree has the new
    corpus's windows, and no names of topics.

    Args:
        tree: Folder of the tree, which is not changed.
        corpus: File, folder or dataset id of the documents, as in `midus_hf.data.corpus.read_corpus`.
        output: Folder of the grown tree.
        column: Column, or JSON key, that holds their text.
        device: Device of the embedding model.
        batch_size: Texts per forward pass.

    Raises:
        RequestError: If the tree does not say how it was built, the output holds a tree or other files, all windows are near a topic,
            or in the cases of `build`.
    """
    output = _checked_output(output, overwrite=False)
    documents = read_corpus(corpus, text_column=column)
    retriever = MemoryRetriever.load(tree, device, batch_size)
    old, embedder = retriever.tree, retriever.embedder
    tokenizer, tokens = load_window_tokenizer(old, tree)
    stored = store_windows(output / WINDOWS, documents, corpus, column, tokenizer, embedder, tokens)
    if TopicNames.load(Path(tree).expanduser() / WINDOWS) is not None:
        print_note(
            f"the grown tree has no names of topics: assign finds paths in it only by texts, by names in {tree}"
        )
    samples = max(TreeOptions.samples, 2 * old.branching)  # a tree of named topics may have any number of them
    quantile = old.origin.topic_quantile
    options = TreeOptions(
        old.branching, old.levels, samples=samples, seed=old.origin.seed or 0, topic_quantile=quantile
    )
    with only_run(output / WINDOWS):
        measured = held_out_rows(len(stored.documents), options.seed)
        by_document = held_out_documents(documents[column], stored.documents, options)
        held_out = by_document if measured is None else measured | by_document
        built = grow_tree(old, stored.embeddings, options, held_out)
        windows = cut_windows(documents[column], tokenizer, tokens)
        set_topic_limits(built, stored.embeddings, stored.documents, by_document, options, first=old.roots)
        return _finished(output, built, windows, embedder, measured, options.seed)


def _finished(
    output: Path,
    built: BuiltTree,
    windows: Iterator[Window],
    embedder: TextEmbedder,
    measured: np.ndarray | None,
    seed: int,
    topics: TopicNames | None = None,
) -> ClusterTree:
    """Set a tree's least similarity by held-out windows, and write all of it."""
    if measured is not None:
        apart = [window.text for window, is_measured in zip(windows, measured, strict=True) if is_measured]
        calibrate(built.tree, apart, embedder.embed, seed)
    # Otherwise a kill later could leave an old tree with new leaves.
    (output / RECORD_FILE).unlink(missing_ok=True)
    (output / WINDOWS / NAMES_FILE).unlink(missing_ok=True)
    if topics is not None:
        topics.save(output / WINDOWS)
    write_array(output / WINDOWS / _LEAVES, built.leaves.astype(np.int32))
    built.tree.save(output)
    return built.tree


def open_build(folder: Path) -> tuple[ClusterTree, StoredWindows, np.ndarray]:
    """Read the tree and windows that `build` wrote, and each window's leaf, `[N]`, int32, memory-mapped.

    Raises:
        RequestError: If there is no tree, its files were altered, or there are no windows.
    """
    folder = folder.expanduser()
    tree = ClusterTree.load(folder)
    stored = open_windows(folder / WINDOWS)
    return tree, stored, np.load(folder / WINDOWS / _LEAVES, mmap_mode="r")


def _checked_output(output: Path, overwrite: bool) -> Path:
    """Return the folder to build a tree in; refuse one with other files, or with a tree to keep."""
    if importlib.util.find_spec("sklearn") is None:
        raise RequestError(f"clustering needs scikit-learn; {install_extra('clusters')}.")
    output = output.expanduser()
    if output.exists() and not output.is_dir():
        raise RequestError(f"output is {str(output)!r}, which is a file; expected a folder to make. Choose another.")
    if (output / RECORD_FILE).exists():
        if not overwrite:
            raise RequestError(
                f"output {str(output)!r} holds a tree; pass --overwrite to replace it, which keeps the embeddings, or choose "
                "another folder."
            )
        return output
    others = output.is_dir() and not (output / WINDOWS).is_dir() and [*output.glob("[!.]*")]
    if others:  # and there is no interrupted build
        raise RequestError(
            f"output is {str(output)!r}, which contains other files than those of a tree; expected a new folder. Choose another."
        )
    return output
