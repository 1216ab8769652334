"""The `midus cluster` command."""

import contextlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from midus_hf.cli.command_line import (
    Column,
    Device,
    argument,
    check_file,
    cli_option,
    command_line,
    flag,
    run_command,
    show_tables,
)
from midus_hf.config.errors import RequestError, first_few

if TYPE_CHECKING:
    import numpy as np

    from midus_hf.topics.tree import ClusterTree

app = command_line(
    "Cluster a corpus into a tree of topics. Find the paths of documents in it, and report what its nodes hold."
)

CorpusPath = Annotated[str, cli_option("A file, folder or dataset id.", "PATH", "--corpus")]
Tree = Annotated[Path, cli_option("Tree that build made.", "TREE")]
BatchSize = Annotated[int, cli_option("Windows per forward pass.", "N", min=1)]

# For a report: number of documents read per node, characters of each, number of words shown; and what a word is.
_READ, _TEXT, _WORDS = 100, 2000, 8
_WORD = re.compile(r"[^\W\d_]{3,}")


@app.command()
def build(
    output: Annotated[Path, cli_option("Folder of the tree.", "TREE")],
    corpus: CorpusPath,
    embedding_model: Annotated[str, cli_option("Folder or hub id of a sentence-transformers model.", "DIR")],
    tokenizer: Annotated[str, cli_option("Folder or hub id of the tokenizer that cuts windows.", "DIR")],
    branching: Annotated[int, cli_option("Children per node.", "N")] = 16,
    levels: Annotated[int, cli_option("Levels of the tree.", "N")] = 4,
    steps: Annotated[int, cli_option("Steps of EM for each node.", "N")] = 20,
    samples: Annotated[int, cli_option("Windows drawn for each step.", "N")] = 6400,
    seed: Annotated[int, cli_option("Seed of all random numbers.", "N")] = 0,
    column: Column = "text",
    window_tokens: Annotated[int, cli_option("Tokens per window.", "N", min=1)] = 2048,
    max_tokens: Annotated[
        int | None, cli_option("Tokens of a window to embed.  [default: the model's most]", "N")
    ] = None,
    topic_column: Annotated[
        list[str] | None, cli_option("Column with names of topics; repeat for levels below.", "NAME")
    ] = None,
    topic_quantile: Annotated[
        float | None,
        cli_option("Share of a topic's held-out texts that its limit lets in.  [default: no limit]", "SHARE"),
    ] = None,
    batch_size: BatchSize = 64,
    device: Device = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace a tree; its embeddings are kept.")] = False,
) -> None:
    """Embed a corpus and cluster it. After an interruption, the same command keeps what is done."""
    from midus_hf.sources.names import check_model_name, check_sources, usable_device

    check_sources([("corpus", corpus)])
    check_model_name("embedding model", embedding_model)
    if not Path(tokenizer).expanduser().is_dir():  # which needs no config
        check_model_name("tokenizer", tokenizer)
    from midus_hf.topics.building import TreeOptions
    from midus_hf.topics.run import build as build_tree_of

    options = TreeOptions(branching, levels, steps, samples, seed, topic_quantile)
    if topic_column and options != TreeOptions(seed=seed, topic_quantile=topic_quantile):
        raise RequestError(
            f"--topic-column is {topic_column[0]!r}, whose names are the nodes; --branching, --levels, --steps and --samples are for "
            "clustering. Leave these out."
        )
    with _results_alone():
        tree = build_tree_of(
            corpus,
            column,
            embedding_model=embedding_model,
            tokenizer=tokenizer,
            output=output,
            options=options,
            window_tokens=window_tokens,
            max_tokens=max_tokens,
            device=usable_device(device),
            batch_size=batch_size,
            topic_columns=topic_column or (),
            overwrite=overwrite,
        )
    assert tree.sizes is not None
    windows = int(tree.sizes[0].sum())
    leaves = len(tree.sizes[-1])
    used = int((tree.sizes[-1] > 0).sum())
    print(
        f"{output}: {windows:,} windows in {used:,} of {leaves:,} leaves, {tree.levels} levels of {tree.branching}, fingerprint "
        f"{tree.fingerprint[:16]}"
    )
    if tree.topic_limits is not None:
        limits = [f"{topic}: {limit:.4f}" for topic, limit in enumerate(tree.topic_limits) if limit is not None]
        print(f"least similarity of a topic's texts: {first_few(limits, 16) or 'no topic has a limit'}")
    if not topic_column and windows < 2 * leaves:  # a node is split into a cluster for every two windows at most
        print(
            f"{windows:,} windows cannot fill {leaves:,} leaves; lower --branching or --levels, or add text",
            file=sys.stderr,
        )


@app.command()
def grow(
    tree: Annotated[Path, argument("Tree that build made; it is not changed.", "TREE")],
    corpus: CorpusPath,
    output: Annotated[Path, cli_option("Folder of the grown tree.", "TREE2")],
    column: Column = "text",
    batch_size: BatchSize = 64,
    device: Device = None,
) -> None:
    """Add nodes to a tree for texts that are far from its topics. Old nodes keep their numbers, and banks their blocks."""
    from midus_hf.sources.names import check_sources, usable_device

    check_sources([("tree", str(tree)), ("corpus", corpus)])
    from midus_hf.topics.run import grow as grow_tree_of
    from midus_hf.topics.tree import ClusterTree

    device = usable_device(device)
    before = ClusterTree.load(tree)
    with _results_alone():
        grown = grow_tree_of(tree, corpus, output, column, device, batch_size)
    pairs = zip(before.centroids, grown.centroids, strict=True)
    new = sum(int(after[len(old) :, 0].isfinite().sum()) for old, after in pairs)
    print(
        f"{output}: {new:,} new nodes in addition to {sum(map(len, before.centroids)):,}, fingerprint {grown.fingerprint[:16]}, "
        f"grown from {before.fingerprint[:16]}"
    )


@app.command()
def assign(
    tree: Tree,
    corpus: CorpusPath,
    output: Annotated[Path, cli_option("File of JSON lines to write, one per document.", "FILE")],
    column: Column = "text",
    batch_size: BatchSize = 64,
    device: Device = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the file.")] = False,
) -> None:
    """Find the path of each document.

    In a tree of named topics, a document's topics give its path if it has them.

    A corpus that the tree was built from is not embedded again.
    """
    from midus_hf.files.outputs import atomic_write
    from midus_hf.sources.names import check_sources, usable_device
    from midus_hf.sources.progress import show_progress

    check_file("output", output, [".jsonl"])
    if output.exists() and not overwrite:
        raise RequestError(f"output {str(output)!r} exists; pass --overwrite to replace it, or choose another file.")
    check_sources([("tree", str(tree)), ("corpus", corpus)])
    from midus_hf.config.errors import print_note
    from midus_hf.data.corpus import read_corpus
    from midus_hf.topics.document_paths import TopicNames, WindowPaths, document_paths, rows_with_paths, stored_paths
    from midus_hf.topics.memory_retriever import MemoryRetriever
    from midus_hf.topics.run import WINDOWS
    from midus_hf.topics.tree import ClusterTree
    from midus_hf.topics.windows import load_window_tokenizer, windows_of_corpus

    with _results_alone():
        device = usable_device(device)
        loaded = ClusterTree.load(tree)
        documents = read_corpus(corpus, text_column=column)
        stored = windows_of_corpus(tree.expanduser() / WINDOWS, documents, column)
        topics = TopicNames.load(tree.expanduser() / WINDOWS)
        if topics is not None and {*topics.columns} <= {*documents.column_names}:
            print_note(f"paths are those of the topics under {', '.join(topics.columns)}")
            by_name = topics.paths(documents).tolist()
            paths: Iterator[tuple[int, WindowPaths]] = ((document, [path]) for document, path in enumerate(by_name))
        elif stored is not None:
            print("the tree was built from this corpus, whose embeddings it has", file=sys.stderr)
            paths = stored_paths(loaded, stored)
        else:
            retriever = MemoryRetriever.load(tree, device=device, batch_size=batch_size)
            cutter, tokens = load_window_tokenizer(loaded, tree)
            paths = document_paths(retriever, cutter, documents[column], tokens)
        rows = rows_with_paths(documents, paths, loaded)
        dates = [name for name, kind in documents.features.items() if "timestamp" in str(getattr(kind, "dtype", ""))]
        if dates:
            print_note(
                f"columns with dates are written as dates are read, in UTC if they had a zone: {', '.join(dates)}"
            )
        with atomic_write(output) as partial, partial.open("w", encoding="utf-8") as file:
            without_topic = 0
            for row in show_progress(rows, desc="assigning", total=len(documents), unit=" documents"):
                without_topic += row["memory_ids"][0] < 0
                file.write(json.dumps(row, default=_as_text) + "\n")
    no_topic = f", {without_topic:,} of which have no topic (-1)" if without_topic else ""
    print(f"{output}: paths of {len(documents):,} documents{no_topic}")


@app.command()
def report(
    tree: Tree,
    level: Annotated[int, cli_option("Level whose nodes are shown.", "N")] = 1,
    nodes: Annotated[int, cli_option("How many nodes are shown, the largest.", "N")] = 16,
    corpus: Annotated[
        str | None, cli_option("The corpus, if it was moved.  [default: where build read it]", "PATH")
    ] = None,
) -> None:
    """Report how many windows nodes have, and their distinctive words. The nodes are those of a level."""
    from midus_hf.look.page import TextTable
    from midus_hf.sources.names import check_sources

    check_sources([("tree", str(tree)), *([] if corpus is None else [("corpus", corpus)])])
    from midus_hf.config.errors import print_note
    from midus_hf.data.corpus import read_corpus
    from midus_hf.topics.run import WINDOWS, open_build
    from midus_hf.topics.windows import windows_of_corpus

    built, stored, leaves = open_build(tree)
    path = corpus or stored.corpus
    documents = read_corpus(path, text_column=stored.column)
    if windows_of_corpus(tree.expanduser() / WINDOWS, documents, stored.column) is None:
        raise RequestError(
            f"{path} has other texts than the corpus that the tree was built from; expected the same ones. Give them by --corpus, or "
            "build the tree again."
        )
    if built.grown_from:
        print_note(f"windows are those of {path} alone, by which the tree has grown")
    found = nodes_with_words(built, leaves, stored.documents, documents[stored.column], level, nodes)
    rows = [[str(node), f"{windows:,}", " ".join(words)] for node, (windows, words) in found.items()]
    show_tables([TextTable(f"Nodes of level {level}", ["node", "windows", "words"], rows)])


def nodes_with_words(
    tree: "ClusterTree", leaves: "np.ndarray", documents: "np.ndarray", texts: Sequence[str], level: int, most: int
) -> dict[int, tuple[int, list[str]]]:
    """Return a level's largest nodes, from 1, with window counts and words rarer in other nodes' texts."""
    import numpy as np

    if not 1 <= level <= tree.levels:
        raise RequestError(f"level is {level}; expected a number from 1 to {tree.levels}, the levels of the tree.")
    if most < 1:
        raise RequestError(f"nodes is {most}; expected at least 1.")
    nodes = np.asarray(leaves, np.int64) // tree.branching ** (tree.levels - level)
    numbers, sizes = np.unique(nodes, return_counts=True)
    read, largest = {}, {}
    for index in sorted(np.argsort(-sizes, kind="stable")[:most].tolist()):
        node = int(numbers[index])
        members = np.unique(documents[nodes == numbers[index]])
        drawn = np.random.default_rng([level, node]).permutation(members)[:_READ].tolist()
        read[node] = [set(_WORD.findall(texts[number][:_TEXT].lower())) for number in drawn]
    everywhere = Counter(word for of_node in read.values() for words in of_node for word in words)
    total = sum(map(len, read.values()))
    for node, of_node in read.items():
        shares = {word: count / len(of_node) for word, count in Counter(w for words in of_node for w in words).items()}
        ratios = {word: share * total / everywhere[word] for word, share in shares.items()}
        # Squared, so that words of all texts, which are more frequent in some topics by chance, get a low weight.
        weights = {word: shares[word] * math.log(ratio) ** 2 for word, ratio in ratios.items() if ratio > 1}
        words = sorted(weights, key=lambda word: (-weights[word], word))[:_WORDS]
        largest[node] = (int(sizes[numbers == node][0]), words)
    return largest


@contextlib.contextmanager
def _results_alone() -> Iterator[None]:
    """Keep standard output for results within the context, and progress bars for terminals."""
    from midus_hf.sources.progress import limit_bars

    with contextlib.redirect_stdout(sys.stderr), limit_bars():
        yield


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        raise RequestError(
            f"a row has the bytes {value[:16]!r}; expected text, numbers, dates, or lists of them. Leave that column out."
        )
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


main = partial(run_command, app, name="midus cluster")
