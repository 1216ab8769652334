"""What a run draws its sequences from, and what is told of it before the first step."""

import importlib.util

from transformers import PreTrainedTokenizerBase

from midus_hf.documents import describe_files
from midus_hf.training.corpus import find_corpus
from midus_hf.training.mapped_tokens import MappedDataset
from midus_hf.training.options import TrainConfig
from midus_hf.training.packing import CorpusPass, PackedDataset, PackedStream
from midus_hf.training.token_cache import cached_tokens

TrainingData = MappedDataset | PackedDataset | PackedStream


def build_dataset(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TrainingData:
    """The sequences of a run: of cached tokens, of a stream, or, where `datasets` is not installed, held in memory.

    Args:
        config: The options of the run.
        tokenizer: As in `tokenise`.
        vocab_size: Number of ids the model embeds.

    Raises:
        DocumentError: If the corpus cannot be read, is empty or shorter than one sequence, or its tokens cannot be kept.
        ValueError: As in `tokenise`.
    """
    corpus = find_corpus(config.corpus, config.seed)

    def start_pass() -> CorpusPass:
        return CorpusPass(corpus.documents(), tokenizer, config.sequence_length, vocab_size)

    if config.corpus.streaming:
        stream = PackedStream(start_pass, config.document_mask)
        next(iter(stream))
        return stream
    if not _can_cache():
        return PackedDataset(start_pass(), config.document_mask)
    tokens = cached_tokens(corpus, tokenizer, vocab_size, config.corpus.cache_dir)
    return MappedDataset(tokens, config.sequence_length, config.document_mask)


def describe_corpus(config: TrainConfig, dataset: TrainingData) -> list[str]:
    """What was read and what was not, and what it makes: a sentence each.

    Args:
        config: The options of the run.
        dataset: What `build_dataset` made of them.
    """
    lines = [] if (line := describe_files(config.corpus.path)) is None else [line]
    if isinstance(dataset, PackedStream):
        return lines
    lines.append(
        f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens: {len(dataset):,} sequences of "
        f"{config.sequence_length:,} ({dataset.num_tokens % config.sequence_length:,} tokens left over)"
    )
    if isinstance(dataset, PackedDataset):
        lines.append("the package datasets is not installed: tokens are in memory, and made again at the next start")
    return lines


def _can_cache() -> bool:
    return importlib.util.find_spec("datasets") is not None
