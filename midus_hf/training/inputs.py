"""What a run reads: config, tokenizer, model and texts; and their digests, for resuming."""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

from midus_hf.config.errors import RequestError, as_request_error, install_extra, print_note
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
from midus_hf.files.checkpoint_files import (
    ACCOMPANYING,
    CARD_FILE,
    CONFIG,
    INPUTS_FILE,
    STREAM_FILE,
    refuse_lfs_pointers,
)
from midus_hf.memories.engram.known_ngrams import SAVING_KEYS
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.memories.hierarchical.options import BankLayout, HierarchicalOptions, block_layouts
from midus_hf.memories.hierarchical.training import growth_of
from midus_hf.memories.hosting.service import BankService
from midus_hf.memories.packs.options import has_glossary
from midus_hf.memories.registry import NO_MEMORIES
from midus_hf.models.host import MemoryConfig
from midus_hf.models.saved_models import check_no_missing_tensors, load_model
from midus_hf.sources.downloads import fetching
from midus_hf.sources.tokenizers import load_tokenizer
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.keys import planned_steps
from midus_hf.training.optim import resolve_trainable
from midus_hf.training.output import new_card

_ROWS_AT_ONCE = 1000
Digests = dict[str, dict[str, str]]


def load_config(arguments: MemoryArguments) -> PreTrainedConfig:
    """Load the config of a run's model, and check what can be checked without weights."""
    source = arguments.model_name_or_path or arguments.config_name
    if source is None:
        raise RequestError("config has no 'model_name_or_path'; set it in the recipe, or by --model.")
    path = Path(source).expanduser()
    with as_request_error(_expected(arguments), OSError, ValueError):
        made_from = path if arguments.config_name is not None and path.exists() else source
        refuse_lfs_pointers(Path(made_from), CONFIG)
        with fetching(source):
            config = AutoConfig.from_pretrained(made_from, trust_remote_code=False)
    if arguments.config_name is not None and hasattr(config, "upscale"):
        del config.upscale  # it describes a base whose weights this model does not have
    key = arguments.length_key
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and (length := getattr(arguments, key)) > limit:
        raise RequestError(
            f"{key} is {length}, but the model has positions for {limit} tokens. Lower {key}, or first raise "
            "max_position_embeddings in the model's config.json, with the rope scaling that it then needs."
        )
    hosts_memory = isinstance(config, MemoryConfig)
    if arguments.config_name is not None and hosts_memory and has_glossary(config.memories()):
        raise RequestError(
            f"config_name is {arguments.config_name!r}, whose model has packs, and a new model has no glossary; expected a config "
            "without packs. Add them to the trained model: upscale --method packs."
        )
    if hosts_memory and getattr(arguments, "use_liger_kernel", False):
        raise RequestError(
            f"use_liger_kernel is true, and Liger has no kernels for {config.model_type}; expected a model without memory. "
            "Leave it out."
        )
    if arguments.adapters is None:
        resolve_trainable(config, arguments.trainable)  # type: ignore[arg-type]
        return config
    if importlib.util.find_spec("peft") is None:
        raise RequestError(f"adapters need peft, not installed; {install_extra('train')}, or leave them out.")
    from midus_hf.training.adapters import read_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    read_adapters(arguments.adapters)
    if is_deepspeed_zero3_enabled():
        raise RequestError(
            "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 shards; expected processes that hold whole "
            "models. Start the run with configs/accelerate/ddp.yaml."
        )
    return config


def load_run_tokenizer(arguments: MemoryArguments) -> PreTrainedTokenizerBase:
    source = arguments.model_name_or_path or arguments.tokenizer_name
    assert source is not None, "a config is named with a tokenizer"
    message = f"tokenizer_name is {source!r}; expected the folder or Hub id of a tokenizer"
    if arguments.model_name_or_path is not None:
        message = f"model_name_or_path is {source!r}, which has no tokenizer that loads"
    with as_request_error(message, OSError, ValueError):
        return load_tokenizer(source)


def load_for_training(arguments: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """Load the model in its dtype, or make it at random; return it and files to save with it, by name."""
    attention, source = arguments.attn_implementation, arguments.model_name_or_path
    with load_unsharded(), as_request_error(_expected(arguments), OSError, ValueError, ImportError, SafetensorError):
        if source is None:
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
            return made, {CARD_FILE: new_card(arguments, config.model_type)}
        options = {"config": config, "attn_implementation": attention, "use_safetensors": True}
        model, missing = load_model(source, **options)
    check_no_missing_tensors(source, missing)
    folder = Path(source)
    if not folder.is_dir():
        try:
            with fetching(source):
                folder = Path(snapshot_download(source, allow_patterns=list(ACCOMPANYING)))
        except (HfHubHTTPError, OSError):
            return model, {}
    paths = sorted(path for pattern in ACCOMPANYING for path in folder.glob(pattern) if path.is_file())
    return model, {path.name: path.read_bytes() for path in paths}


def _expected(arguments: MemoryArguments) -> str:
    if arguments.model_name_or_path is None:
        return f"config_name is {arguments.config_name!r}; expected the file, folder or Hub id of a language model's config"
    return f"model_name_or_path is {arguments.model_name_or_path!r}; expected the folder or Hub id of a language model"


@contextlib.contextmanager
def load_unsharded() -> Iterator[None]:
    """Load or make whole models in each process in the context, although ZeRO-3 would shard them."""
    config_before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_before


class RunTexts(NamedTuple):
    """Training rows, held-out texts as a Trainer takes them, a phrase on what is read, the paths' tree.

    `held_out` is None if nothing is measured.
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

    def pack(key: str, rows: Any) -> tuple[PackedTexts, str | None]:
        if column is None or (key != "corpus" and column not in rows.column_names):
            return packed_sequences(rows, tokenizer, length, key=key, **options), None
        written = checked_paths(rows, banks, column, key)
        return leaf_sequences(rows, tokenizer, length, paths=written.paths, depth=depth, **options), written.tree

    depth = max((max(layout.levels) for layout in banks.values()), default=None)
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
    fingerprint, folder, shape = corpus_tree, None, None
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


def model_hashes(model: PreTrainedModel, arguments: Any) -> Digests:
    """Return the SHA-256 of a model's settings, of loaded (not new) weights, and of files next to them."""
    is_new = arguments.model_name_or_path is None
    digests = dict[str, str]()
    tensors = {} if is_new else model.state_dict()

    def hash_tensor(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    if not is_new:
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            digests["weights"] = hashlib.sha256("\n".join(pool.map(hash_tensor, sorted(tensors))).encode()).hexdigest()
    settings = json.loads(model.config.to_json_string())
    kept = json.dumps({key: value for key, value in settings.items() if key not in SAVING_KEYS}, sort_keys=True)
    digests["settings"] = hashlib.sha256(kept.encode()).hexdigest()
    services: Any = getattr(getattr(model, "stack", None), "services", {})
    for name, service in services.items():
        if isinstance(service, BankService) and (digest := service.digest()) is not None:
            digests[f"files beside the weights ({name})"] = hashlib.sha256(digest.encode()).hexdigest()
    return {"config_name" if is_new else "model_name_or_path": digests}


def check_inputs(trainer: Any, hashes: Digests, arguments: Any, checkpoint: Path | None) -> Digests:
    """Return the digests of a model and a Trainer's sequences; refuse others than in a checkpoint's run.

    Held-out texts may change, unless they choose the saved model.
    """
    from datasets import Dataset

    held_out = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    if checkpoint is not None and isinstance(trainer.train_dataset, StreamedSequences):
        count = len(list(checkpoint.glob(STREAM_FILE.format("*"))))
        if count != arguments.world_size:
            raise RequestError(
                f"{checkpoint} has the streams of {count} processes, and this run has {arguments.world_size}; expected the same "
                "number of processes: each resumes its own stream."
            )
    digests = {**hashes, arguments.data_key: dict[str, str](), "eval_text": dict[str, str]()}
    for key, datasets in ((arguments.data_key, {"": trainer.train_dataset}), ("eval_text", held_out)):
        for name, rows in datasets.items():
            if isinstance(rows, Dataset | StreamedSequences):
                digest = rows_digest(rows) if isinstance(rows, Dataset) else rows.digest
                digests[key][f"sequences of tokens of {name}" if name else "sequences of tokens"] = digest
    if (tree := getattr(arguments, "tree", None)) is not None:
        from midus_hf.topics.tree import ClusterTree

        digests["tree"] = {"nodes": ClusterTree.load(tree).fingerprint}
    path = None if checkpoint is None else checkpoint / INPUTS_FILE
    if path is None or not path.is_file():  # a script may have saved it
        return digests
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, parts in digests.items():
        if key == "eval_text" and not arguments.load_best_model_at_end:
            continue
        for part, digest in parts.items():
            before = earlier.get(key, {}).get(part, digest)
            if before != digest:
                raise RequestError(
                    f"{key} is {getattr(arguments, key)!r}, whose {part} are not those that the run to resume read (SHA-256 "
                    f"{digest[:16]}, expected {before[:16]}); put them back, or start a new run in another folder."
                )
    return digests


def rows_digest(rows: Any) -> str:
    """Return the SHA-256 of the rows of a `datasets.Dataset`, independent of its files."""
    import pyarrow
    from pyarrow import compute

    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in sorted(batch.column_names):
            column = batch[name].combine_chunks()
            digest.update(f"{name}:{column.type}\n".encode())
            if not pyarrow.types.is_primitive(getattr(column.type, "value_type", column.type)):
                digest.update(json.dumps(column.to_pylist(), default=str).encode())
                continue
            is_listed = hasattr(column.type, "value_type")
            parts = [compute.list_value_length(column), compute.list_flatten(column)] if is_listed else [column]
            for numbers in parts:
                digest.update(numbers.to_numpy(zero_copy_only=False).data)
    return digest.hexdigest()
