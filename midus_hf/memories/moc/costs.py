"""FLOPs of Mixture of Chapters, and the values that a token reads."""

import math

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import (
    SOFTMAX,
    attention_products,
    attention_weights,
    flops_of,
    linear,
    rms_norm,
    router_losses,
    top_k,
    values_read_of,
)
from midus_hf.memories.moc.options import MocOptions


@values_read_of(MocOptions)
def moc_values_read(options: MocOptions, sizes: ModelSizes) -> int:
    return (options.shared_chapters + options.k) * options.chapter_tokens * sizes.hidden_size


@flops_of(MocOptions)
def moc_flops(
    options: MocOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations.

    For routing `sequence` the count is the paper's: memory tokens are weighted, normalised and projected per sequence. With `chunk`
    and `token`, choices overlap: each memory token that is read is normalised and projected once, at most the whole bank, and
    weights scale scores and weighted sums. Chunks are pooled by a running sum, divided once per chunk. The router's losses count as
    in the paper; turning its probabilities into weights does not count.
    """
    hidden, heads, rows = sizes.hidden_size, sizes.num_heads, batch * tokens
    chunks = math.ceil(tokens / options.chunk_size) + (options.first_tokens < min(tokens, options.chunk_size))
    segments = {"chunk": chunks, "token": tokens}.get(options.routing, 1)
    choices, selected = batch * segments, (options.shared_chapters + options.k) * options.chapter_tokens
    read = choices * selected if segments == 1 else min(choices * selected, options.memory_tokens)
    scores = heads * rows * selected
    pooling = 0 if options.routing == "token" else batch * hidden * (tokens - 1) + choices * hidden
    weighting = read * hidden if segments == 1 else 2 * scores
    return {
        "router": pooling
        + linear(choices, hidden, options.chapters)
        + choices * options.chapters * SOFTMAX
        + top_k(choices, options.chapters, options.k),
        "router losses": router_losses(choices, options.chapters, options.k),
        "memory tokens": weighting + rms_norm(read, hidden),
        "attention": 2 * linear(rows, hidden, hidden)
        + 2 * linear(read, hidden, hidden)
        + attention_products(batch, tokens, selected, hidden)
        + attention_weights(batch, heads, tokens, selected),
        "norms": rms_norm(rows, hidden),
        "residual adds": rows * hidden,
    }
