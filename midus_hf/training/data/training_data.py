"""The sequences that a run trains on, and what the run says about them before the first step."""

import importlib.util
import math
from collections.abc import Mapping

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.documents import describe_files, import_datasets
from midus_hf.documents.document_paths import read_paths
from midus_hf.training.data.clustered_corpus import ClusteredDataset, check_paths, describe_leaves
from midus_hf.training.data.corpus import find_corpus
from midus_hf.training.data.mapped_tokens import MappedDataset
from midus_hf.training.data.mixture import Mixture
from midus_hf.training.data.packing import CorpusPass, PackedDataset, PackedStream
from midus_hf.training.data.sequence_audit import CorpusDocuments, SequenceAudit
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions, TrainConfig

Part = MappedDataset | PackedDataset | PackedStream | ClusteredDataset
TrainingData = Part | Mixture


def open_corpora(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, banks: Mapping[str, BankLayout]
) -> list[Part]:
    """Return the sequences of each corpus: from cached tokens, a stream or, without `datasets`, from memory.

    Call this function before processes are connected or a GPU is used, since making tokens forks processes.

    Args:
        tokenizer: A tokenizer with an EOS token, as in `tokenise`.
        vocab_size: Number of ids the model embeds.
        banks: Layouts of the banks from which texts fetch blocks, by the name of the memory.

    Raises:
        DocumentError: If a corpus cannot be read, is empty or shorter than one sequence, or its tokens cannot be kept.
        ValueError: If `tokenise` raises it; if a corpus has paths but the model no blocks for them, or the model needs
            paths that a corpus lacks.
    """
    return [_open(corpus, config, tokenizer, vocab_size, banks) for corpus in config.corpora]


def build_dataset(config: TrainConfig, parts: list[Part], sequences_a_step: int) -> TrainingData:
    """Return the sequences of a run: all sequences of its only corpus, or a mixture of several corpora.

    Args:
        parts: Sequences of each corpus, from `open_corpora`.
        sequences_a_step: Sequences that all processes together take in a step.

    Raises:
        ValueError: If the share of a corpus is less than one sequence.
    """
    if not isinstance(config.corpus, list):
        return parts[0]
    all_sequences = sum(len(part) for part in parts if not isinstance(part, PackedStream))
    steps = config.max_steps or math.ceil((config.num_train_epochs or 1) * all_sequences / sequences_a_step)
    return Mixture(parts, [corpus.weight for corpus in config.corpus], steps, sequences_a_step, config.seed)


def audit_of(dataset: TrainingData, config: TrainConfig) -> SequenceAudit:
    """Return the audit of a run, which records the documents that train each block.

    Args:
        dataset: Sequences of the run, from `build_dataset`.

    Raises:
        DocumentError: If a corpus can no longer be read.
    """
    assert isinstance(dataset, (ClusteredDataset, Mixture)), "every corpus has paths"
    if not PartialState().is_main_process:
        return SequenceAudit(dataset)
    corpora = [(find_corpus(corpus, config.seed), corpus.id_column) for corpus in config.corpora]
    return SequenceAudit(dataset, CorpusDocuments(corpora))


def describe_corpus(config: TrainConfig, dataset: TrainingData) -> list[str]:
    """Return sentences about what was read, what was not read, and the resulting sequences.

    Args:
        dataset: Sequences of the run, from `build_dataset`.
    """
    lines = [line for corpus in config.corpora if (line := describe_files(corpus.path)) is not None]
    if isinstance(dataset, Mixture):
        for corpus, part, count in zip(config.corpora, dataset.parts, dataset.counts, strict=True):
            lines += [f"{corpus.path}: {_made(part, config.sequence_length)}"]
            lines += [f"  {count:,} drawn ({count / len(dataset):.1%} of the run), {count / len(part):.2f} passes"]
        parts = dataset.parts
    elif isinstance(dataset, PackedStream):
        return lines
    else:
        lines.append(_made(dataset, config.sequence_length))
        parts = [dataset]
    if any(isinstance(part, PackedDataset) for part in parts):
        lines.append("the package datasets is not installed: tokens are in memory, and made again at the next start")
    return lines


def _open(
    options: CorpusOptions,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    banks: Mapping[str, BankLayout],
) -> Part:
    corpus = find_corpus(options, config.seed)
    if options.path_column is None and any(layout.blocks.without_ids == "none" for layout in banks.values()):
        raise ValueError(
            "the model fetches blocks by the path of a text, and corpus.path_column is not given; expected the column that has "
            "paths. midus cluster assign writes them."
        )

    def start_pass() -> CorpusPass:
        return CorpusPass(corpus.documents(), tokenizer, config.sequence_length, vocab_size)

    if options.path_column is not None:
        documents = read_paths(corpus.rows(), options.path_column)
        check_paths(documents.paths, banks, options.path_column)
        import_datasets("a corpus that is packed within the leaves of a tree")
        tokens = cached_tokens(corpus, tokenizer, vocab_size, options.cache_dir)
        depth = max(max(layout.levels) for layout in banks.values())
        return ClusteredDataset(
            tokens,
            documents.paths,
            config.sequence_length,
            tokenizer.eos_token_id,
            depth,
            config.document_mask,
            documents.tree,
        )
    if options.streaming:
        stream = PackedStream(start_pass, config.document_mask)
        next(iter(stream))
        return stream
    if not _can_cache():
        return PackedDataset(start_pass(), config.document_mask)
    tokens = cached_tokens(corpus, tokenizer, vocab_size, options.cache_dir)
    return MappedDataset(tokens, config.sequence_length, config.document_mask)


def _made(dataset: MappedDataset | PackedDataset | ClusteredDataset, sequence_length: int) -> str:
    if isinstance(dataset, ClusteredDataset):
        return f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, {describe_leaves(dataset)}"
    return (
        f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens: {len(dataset):,} sequences of "
        f"{sequence_length:,} ({dataset.num_tokens % sequence_length:,} tokens left over)"
    )


def _can_cache() -> bool:
    return importlib.util.find_spec("datasets") is not None
