"""Tokens of a corpus as a run keeps them, what lies in the cache, and processes of their own that ask for them."""

import multiprocessing
from pathlib import Path

import torch
from training.tiny_run import tiny_tokenizer

from midus_hf.training.data.former_corpus import find_corpus
from midus_hf.training.data.former_packing import CorpusTokens
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions

FORK = multiprocessing.get_context("fork")


def tokens_of(path, cache: Path, tokenizer=None, vocab_size: int = 128, **options) -> CorpusTokens:
    corpus = find_corpus(CorpusOptions(path=str(path), **options))
    return cached_tokens(corpus, tokenizer or tiny_tokenizer(), vocab_size, str(cache))


def row(tokens: CorpusTokens) -> list[int]:
    return tokens.cut(0, tokens.num_tokens).tokens.tolist()


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def in_a_process(work, *args) -> tuple:
    """Start a function in another process, with what it sends back: `work(connection, ...)`."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_on_one_thread, args=(work, theirs, *args))
    process.start()
    theirs.close()
    return process, ours


def _on_one_thread(work, *args) -> None:
    """A process that is forked where OpenMP has threads has none of these, and ends when it asks them for work."""
    torch.set_num_threads(1)
    work(*args)
