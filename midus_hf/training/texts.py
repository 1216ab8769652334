"""Training and held-out data of a run: the corpus and held-out texts as packed sequences."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import print_note
from midus_hf.data.corpus import TREE_COLUMN, read_corpus, stream_rows
from midus_hf.data.packing import PackedTexts, checked_paths, leaf_sequences, packed_sequences
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.memories.hierarchical.options import BankLayout, block_layouts
from midus_hf.memories.hierarchical.training import growth_of, model_banks
from midus_hf.models.host import MemoryConfig
from midus_hf.training.arguments import MemoryArguments, TrainArguments


class RunTexts(NamedTuple):
    """Training rows, sequences of held-out texts by name, a phrase on what is read, and the tree of the paths, if any."""

    train: Any
    held_out: dict[str, Any]
    reads: str
    tree: str | None = None

    @property
    def eval_dataset(self) -> Any:
        """The held-out texts as a Trainer takes them: by name, or a single text without a name, or None."""
        return self.held_out.get("", self.held_out) or None


def read_texts(arguments: TrainArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> RunTexts:
    """Return the corpus and the held-out texts as sequences of `arguments.sequence_length` tokens."""
    length, column = arguments.sequence_length, arguments.path_column
    banks: dict[str, BankLayout] = block_layouts(config.memories()) if isinstance(config, MemoryConfig) else {}
    if arguments.tree is not None:
        from midus_hf.topics.tree import folder_of_tree

        roots = growth_of(folder_of_tree(Path(arguments.tree).expanduser()))["roots"]
        banks = {name: layout.with_roots(roots) for name, layout in banks.items()}
    options: dict[str, Any] = {"documents_apart": arguments.document_mask, "text_column": arguments.text_column}
    options["vocab_size"] = config.get_text_config().vocab_size

    def pack(key: str, rows: Any) -> tuple[PackedTexts, str | None]:
        """Return sequences, and the fingerprint of the tree that their paths name."""
        if column is None or (key != "corpus" and column not in rows.column_names):
            return packed_sequences(rows, tokenizer, length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        return leaf_sequences(rows, tokenizer, length, paths=written.paths, depth=depth, **options), written.tree

    depth = max((max(layout.levels) for layout in banks.values()), default=None)
    if column is None and any(layout.blocks.without_ids == "none" for layout in banks.values()):
        raise RequestError(
            "the model fetches blocks by the path of a text, and path_column is not given; expected the column that has "
            "paths. midus cluster assign writes them."
        )
    train: Any
    if arguments.streaming:
        of_paths: dict[str, Any] = {}
        if column is not None:
            read_paths = partial(checked_paths, banks=banks, path_column=column)
            of_paths = {"read_paths": read_paths, "path_column": column, "depth": depth}
        train = _stream_of_process(arguments, tokenizer, **options, **of_paths)
        order = f"drawn from {arguments.shuffle_buffer:,}" if arguments.shuffle_buffer else "in order"
        reads, tree = f"corpus: a stream of sequences of {length:,}, {order}", train.tree
    else:
        named: dict[str, Any] = {"split": arguments.corpus_split, "name": arguments.corpus_name}
        rows = read_corpus(arguments.corpus or [], text_column=arguments.text_column, **named)
        packed, tree = pack("corpus", rows)
        train, reads = packed.sequences, f"corpus: {packed.phrase(length)}"
    held_out = read_held_out(arguments, arguments.text_column, length, lambda key, rows: pack(key, rows)[0])
    return RunTexts(train, held_out, reads, tree)


def _stream_of_process(arguments: TrainArguments, tokenizer: Any, **options: Any) -> StreamedSequences:
    """Return the sequences of the texts that this process reads, shuffled as no other process does."""
    columns = [arguments.text_column, *([arguments.path_column, TREE_COLUMN] if arguments.path_column else [])]
    named: dict[str, Any] = {"split": arguments.corpus_split, "name": arguments.corpus_name}
    texts = stream_rows("corpus", arguments.corpus or [], columns, **named)
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    options |= {"shuffle_buffer": arguments.shuffle_buffer, "seed": [seed, arguments.process_index]}
    options |= {"rank": arguments.process_index, "world_size": arguments.world_size}
    return StreamedSequences(texts, tokenizer, arguments.sequence_length, **options)


def read_held_out(
    arguments: MemoryArguments, text_column: str, length: int, pack: Callable[[str, Any], PackedTexts]
) -> dict[str, Any]:
    """Return the sequences of held-out texts by name, packed by a function, and print what is not measured."""
    held_out = {}
    for name, path in arguments.eval_texts.items():
        key = f"eval_text {name}".rstrip()
        packed = pack(key, read_corpus(path, key=key, text_column=text_column))
        if packed.dropped:
            print_note(f"{key}: {packed.phrase(length)}")
        held_out[name] = packed.sequences
    return held_out


def use_tree(model: Any, tree: str | None, corpus_tree: str | None) -> None:
    """Check that a model's banks belong to the tree of a run, a folder or the corpus's tree, and save trained banks with it."""
    fingerprint, folder, shape = corpus_tree, None, None
    if tree is not None:
        from midus_hf.topics.tree import ClusterTree, folder_of_tree

        loaded = ClusterTree.load(tree)
        if corpus_tree not in (None, loaded.fingerprint):
            raise RequestError(
                f"corpus belongs to the tree with the fingerprint {corpus_tree[:16]}..., and tree {tree!r} has "
                f"{loaded.fingerprint[:16]}...; expected one tree. Assign all texts by the same tree."
            )
        fingerprint, shape = loaded.fingerprint, (loaded.levels, loaded.branching)
        folder = folder_of_tree(Path(tree).expanduser())
    remedy = "Assign texts by the tree of the model, or use a model whose bank has not been trained."
    for banks in model_banks(model):
        if banks.opened:
            check_tree(banks, fingerprint, "the corpus", remedy, shape=shape, **growth_of(folder))
            banks.tree = (fingerprint, folder)
