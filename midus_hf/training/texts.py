"""The texts of a run: sequences to train on, and those that are held out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError, print_note
from midus_hf.data.corpus import TREE_COLUMN, read_corpus, read_rows
from midus_hf.data.held_out import (
    MEASURED_SHARE,
    MIN_MEASURED,
    choose_measured,
    note_nothing_held_out,
    read_held_out_rows,
    split_held_out,
)
from midus_hf.data.packing import PackedTexts, TooFewTokensError, checked_paths, leaf_sequences, packed_sequences
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.memories.hierarchical.options import BankLayout, HierarchicalOptions, block_layouts
from midus_hf.memories.hierarchical.training import growth_of
from midus_hf.memories.registry import NO_MEMORIES
from midus_hf.models.host import MemoryConfig
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.keys import planned_steps


class RunTexts(NamedTuple):
    """What a run trains on and measures.

    Args:
        train: Training rows: packed sequences, a stream of them, or chats.
        held_out: Rows to measure as a Trainer takes them: a dataset, or several by name; None if nothing is measured.
        reads: A phrase on how much is read.
        tree: Fingerprint of the tree of topics that paths are of, if rows have paths.
    """

    train: Any
    held_out: Any
    reads: str
    tree: str | None = None


def read_texts(arguments: TrainArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> RunTexts:
    """Return the corpus and the held-out texts as sequences of `arguments.sequence_length` tokens."""
    length, column = arguments.sequence_length, arguments.path_column
    memories = config.memories() if isinstance(config, MemoryConfig) else NO_MEMORIES
    if column is None and any(
        isinstance(each.options, HierarchicalOptions) and each.options.without_ids == "none"
        for each in memories.entries
    ):
        raise RequestError(
            "the model fetches blocks by the path of a text, and path_column is not given; expected the column that has "
            "paths. midus cluster assign writes them."
        )
    banks: dict[str, BankLayout] = {} if column is None else block_layouts(memories)
    if arguments.tree is not None:
        from midus_hf.topics.tree import folder_of_tree

        roots = growth_of(folder_of_tree(Path(arguments.tree).expanduser()))["roots"]
        banks = {name: layout.with_roots(roots) for name, layout in banks.items()}
    options: dict[str, Any] = {"documents_apart": arguments.document_mask, "text_column": arguments.text_column}
    options["vocab_size"] = config.get_text_config().vocab_size
    depth = max((max(layout.levels) for layout in banks.values()), default=None)

    def pack(key: str, rows: Any) -> tuple[PackedTexts, str | None]:
        if column is None or (key != "corpus" and column not in rows.column_names):
            return packed_sequences(rows, tokenizer, length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        return leaf_sequences(rows, tokenizer, length, paths=written.paths, depth=depth, **options), written.tree

    train: Any
    share = arguments.eval_share
    measured = None
    corpus = arguments.corpus or []
    named: dict[str, Any] = {"split": arguments.corpus_split, "name": arguments.corpus_name}
    if arguments.streaming:
        columns = [arguments.text_column]
        settings = dict[str, Any](options)
        if column is not None:
            columns += [column, TREE_COLUMN]
            read_paths = partial(checked_paths, banks=banks, path_column=column)
            settings |= {"read_paths": read_paths, "path_column": column, "depth": depth}
        # No other process shuffles its texts in the same way.
        seed = [arguments.seed if arguments.data_seed is None else arguments.data_seed, arguments.process_index]
        settings |= {"shuffle_buffer": arguments.shuffle_buffer, "seed": seed}
        settings |= {"rank": arguments.process_index, "world_size": arguments.world_size, "held_out_share": share}
        if share:
            measured = _pack_held_out_of_stream(read_rows("corpus", corpus, columns=columns, **named), arguments, pack)
        train = StreamedSequences(read_rows("corpus", corpus, columns=columns, **named), tokenizer, length, **settings)
        order = f"drawn from {arguments.shuffle_buffer:,}" if arguments.shuffle_buffer else "in order"
        reads = f"corpus: a stream of sequences of {length:,}, {order}"
        tree = train.tree
    else:
        rows = read_corpus(corpus, text_column=arguments.text_column, **named)
        if share:
            rows, measured = _pack_held_out(rows, arguments, pack)
        packed, tree = pack("corpus", rows)
        train = packed.sequences
        reads = f"corpus: {packed.phrase(length)}"
        if measured is not None:
            measured = choose_measured(measured, planned_steps(arguments, len(train)) * arguments.sequences_per_step)
    held_out = read_held_out(arguments, arguments.text_column, length, lambda key, rows: pack(key, rows)[0])
    return RunTexts(train, held_out if measured is None else measured, reads, tree)


def _pack_held_out(rows: Any, arguments: Any, pack: Callable[[str, Any], Any]) -> tuple[Any, Any]:
    """Return a corpus without the documents that are held out, and these packed; None if they are too few."""
    train, held_out = split_held_out(rows, arguments.eval_share, [arguments.text_column])
    try:
        if not len(train) or not len(held_out):
            raise TooFewTokensError
        pack("corpus", train)  # raises if too few texts are left; packed again by the caller, from the cache
        sequences = pack("corpus", held_out)[0].sequences
    except TooFewTokensError:
        share = f"{arguments.eval_share:.0%}"
        note_nothing_held_out("corpus", f"{len(rows):,} documents are too few to hold out {share} of them")
        return rows, None
    if arguments.process_index == 0:
        print(f"corpus: {len(held_out):,} of {len(rows):,} documents are held out, to measure what is learned")
    return train, sequences


def _pack_held_out_of_stream(stream: Any, arguments: Any, pack: Callable[[str, Any], Any]) -> Any:
    """Return a stream's first held-out documents as sequences; None if they are too few."""
    from datasets import Dataset

    count = max(MIN_MEASURED, round(MEASURED_SHARE * arguments.max_steps * arguments.sequences_per_step))
    tokens = count * arguments.sequence_length
    rows = read_held_out_rows(stream, arguments.eval_share, arguments.text_column, tokens)
    try:
        if not rows:
            raise TooFewTokensError
        sequences = pack("corpus", Dataset.from_list(rows))[0].sequences
    except TooFewTokensError:
        note_nothing_held_out("corpus", f"the {len(rows):,} documents that were held out fill no sequence")
        return None
    if arguments.process_index == 0:
        print(
            f"corpus: {arguments.eval_share:.0%} of the documents are held out, and the first measure what is learned"
        )
    return sequences.select(range(min(count, len(sequences))))


def read_held_out(
    arguments: MemoryArguments, text_column: str, length: int, pack: Callable[[str, Any], PackedTexts]
) -> Any:
    """Return the packed sequences of held-out texts as `RunTexts` has them; print what is not measured."""
    held_out = {}
    for name, path in arguments.eval_texts.items():
        key = f"eval_text {name}".rstrip()
        packed = pack(key, read_corpus(path, key=key, text_column=text_column))
        if packed.dropped:
            print_note(f"{key}: {packed.phrase(length)}")
        held_out[name] = packed.sequences
    return held_out.get("", held_out) or None


def use_tree(model: Any, tree: str | None, corpus_tree: str | None) -> None:
    """Check that banks belong to the tree of a run, a folder or the corpus's; save trained banks with it."""
    fingerprint = corpus_tree
    folder = None
    shape = None
    if tree is not None:
        from midus_hf.topics.tree import ClusterTree, folder_of_tree

        loaded = ClusterTree.load(tree)
        if corpus_tree not in (None, loaded.fingerprint):
            raise RequestError(
                f"corpus belongs to the tree with the fingerprint {corpus_tree[:16]}..., and tree {tree!r} has "
                f"{loaded.fingerprint[:16]}...; expected one tree. Assign all texts by the same tree."
            )
        fingerprint = loaded.fingerprint
        shape = (loaded.levels, loaded.branching)
        folder = folder_of_tree(Path(tree).expanduser())
    remedy = "Assign texts by the tree of the model, or use a model whose bank has not been trained."
    banks = getattr(model, "banks", None)
    if banks is not None and banks.opened:
        check_tree(banks, fingerprint, "the corpus", remedy, shape=shape, **growth_of(folder))
        banks.tree = (fingerprint, folder)
