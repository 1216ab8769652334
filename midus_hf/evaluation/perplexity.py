"""Perplexity of a language model on a text."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.evaluation.fetching import PathFinder
from midus_hf.evaluation.text_rows import read_rows, text_rows


@dataclasses.dataclass(frozen=True)
class PerplexityResult:
    """Measures of how well a model predicts a text.

    Args:
        perplexity: `exp` of the mean negative log-likelihood per token. Comparable between models of one tokenizer.
        bits_per_byte: Negative log2-likelihood per byte of UTF-8. Comparable between tokenizers.
        tokens: Number of predicted tokens.
        sequence_length: Greatest number of tokens per window.
        seconds: Wall time of the forward passes.
        tokens_per_second: Number of tokens fed to the model per second.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    sequence_length: int
    seconds: float
    tokens_per_second: float


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 4,
    progress: Callable[[int, int], Any] | None = None,
    apart: bool = False,
    find_paths: PathFinder | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a model on documents, in windows in which every token is predicted once (`text_rows`).

    The result is the same on every run.

    Args:
        model: A causal language model. It is in eval mode during the measurement.
        tokenizer: A fast tokenizer, which knows the offsets of each token in the text.
        documents: Documents with at least `sequence_length` tokens to predict together; with `apart`, one token is enough.
        sequence_length: Tokens per window. Default: 1024, or the longest that the model was made for if that is shorter.
        max_tokens: Greatest number of tokens to predict, in whole windows spread evenly over the text. Default: all.
        batch_size: Windows per forward pass. It changes only speed, memory, and the last bits of floats. Default: 4.
        progress: Called with the number of tokens that a pass predicted, and the number of all tokens to predict. Default: none.
        apart: Whether documents are kept apart: windows end where a document ends, and the next document is predicted without
            it. Default: False, documents are laid end to end with a blank line between them.
        find_paths: Function that finds the path of each whole document, by which all windows of the document fetch blocks. It
            needs `apart`. Default: nothing is fetched.

    Raises:
        ValueError: If an option is out of range, if the text is too short or has an id that the model does not embed, or if the
            tokenizer is not a fast one.
        RuntimeError: If the perplexity is not finite.
    """
    assert find_paths is None or apart, "documents that are laid end to end have no path of their own"
    texts = list(documents)
    lengths = {"sequence_length": sequence_length, "max_tokens": max_tokens}
    rows = text_rows("text", texts, tokenizer, model.config, joined=not apart, **lengths)
    if find_paths is not None:
        rows = dataclasses.replace(rows, paths=find_paths(texts))
    started = time.perf_counter()
    show = None if progress is None else lambda tokens: progress(tokens, rows.num_tokens)
    losses = read_rows(model, rows, batch_size=batch_size, progress=show)
    seconds = time.perf_counter() - started
    return PerplexityResult(
        perplexity=math.exp(losses.mean),
        bits_per_byte=losses.sums.sum().item() / math.log(2) / sum(rows.utf8_bytes),
        tokens=rows.num_tokens,
        sequence_length=max(len(row) - 1 for row in rows.rows),
        seconds=seconds,
        tokens_per_second=rows.num_tokens / seconds,
    )
