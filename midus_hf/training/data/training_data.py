"""The sequences that a run trains on, and what the run says about them before the first step."""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.topics.documents import read_paths
from midus_hf.topics.text_files import describe_files, import_datasets
from midus_hf.training.data.clustered_corpus import ClusteredDataset, check_paths
from midus_hf.training.data.former_corpus import find_corpus
from midus_hf.training.data.former_packing import CorpusTokens, PackedDataset, PackedStream, tokenise
from midus_hf.training.data.mixture import Mixture
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions, TrainConfig

Part = PackedDataset | PackedStream | ClusteredDataset
TrainingData = Part | Mixture


def open_corpora(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, banks: Mapping[str, BankLayout]
) -> list[Part]:
    """Return the sequences of each corpus: from cached tokens, a stream or, without `datasets`, from memory.

    Call this function before processes are connected or a GPU is used, since making tokens forks processes.

    Args:
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
        sequences_a_step: Sequences that all processes together take in a step.

    Raises:
        ValueError: If the share of a corpus is less than one sequence.
    """
    if not isinstance(config.corpus, list):
        return parts[0]
    all_sequences = sum(len(part) for part in parts if not isinstance(part, PackedStream))
    steps = config.max_steps or math.ceil((config.num_train_epochs or 1) * all_sequences / sequences_a_step)
    return Mixture(parts, [corpus.weight for corpus in config.corpus], steps, sequences_a_step, config.seed)


def parts_of(dataset: TrainingData) -> Sequence[Part]:
    """Return the sequences of each corpus of a run."""
    return dataset.parts if isinstance(dataset, Mixture) else [dataset]


def describe_corpus(config: TrainConfig, dataset: TrainingData) -> list[str]:
    """Return sentences about what was read, what was not read, and the resulting sequences."""
    lines = [line for corpus in config.corpora if (line := describe_files(corpus.path)) is not None]
    if isinstance(dataset, PackedStream):
        return lines
    if isinstance(dataset, Mixture):
        for corpus, part, count in zip(config.corpora, dataset.parts, dataset.counts, strict=True):
            lines += [f"{corpus.path}: {_made(part)}"]
            lines += [f"  {count:,} drawn ({count / len(dataset):.1%} of the run), {count / len(part):.2f} passes"]
    else:
        lines.append(_made(dataset))
    if not _can_cache():
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

    def start_pass() -> Iterator[list[int]]:
        return tokenise(corpus.documents(), tokenizer, vocab_size)

    if options.streaming:
        stream = PackedStream(start_pass, config.sequence_length, config.document_mask)
        next(iter(stream))
        return stream
    documents = None
    if options.path_column is not None:
        documents = read_paths(corpus.rows(), options.path_column)
        check_paths(documents.paths, banks, options.path_column)
        import_datasets("a corpus that is packed within the leaves of a tree")
    if documents is None and not _can_cache():
        tokens = CorpusTokens.held(start_pass())
    else:
        tokens = cached_tokens(corpus, tokenizer, vocab_size, options.cache_dir)
    if documents is None:
        return PackedDataset(tokens, config.sequence_length, config.document_mask)
    return ClusteredDataset(
        tokens,
        documents.paths,
        config.sequence_length,
        tokenizer.eos_token_id,
        depth=max(max(layout.levels) for layout in banks.values()),
        document_mask=config.document_mask,
        tree=documents.tree,
    )


def _made(dataset: PackedDataset | ClusteredDataset) -> str:
    """Return a phrase about the documents, tokens and sequences of a corpus."""
    tokens, length = dataset.tokens, dataset.sequence_length
    made = f"{tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens"
    sequences = f"{len(dataset):,} sequences of {length:,}"
    if isinstance(dataset, ClusteredDataset):
        padding = 1 - tokens.num_tokens / (len(dataset) * length)
        return f"{made}, packed within {dataset.num_leaves:,} leaves: {sequences} ({padding:.1%} of the tokens are padding)"
    return f"{made}: {sequences} ({tokens.num_tokens % length:,} tokens left over)"


def _can_cache() -> bool:
    return importlib.util.find_spec("datasets") is not None
