"""Operations of memories, and the values that they read, registered by the class of options."""

import math

from midus_hf.config.by_type import ByType
from midus_hf.config.flops.rules import (
    ACTIVATIONS,
    SIGMOID,
    SOFTMAX,
    attention_products,
    attention_weights,
    layer_norm,
    linear,
    rms_norm,
    router_losses,
    top_k,
)
from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.config.memories.depth_attention import DepthAttentionOptions, Slot
from midus_hf.config.memories.headwise import HeadwiseOptions
from midus_hf.config.memories.hierarchical import HierFFNOptions, HierKVOptions, HierLoraOptions
from midus_hf.config.memories.linear import LinearOptions
from midus_hf.config.memories.product_key import ProductKeyOptions
from midus_hf.config.memories.retrieval import RetrievalOptions, SharedValueOptions
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.memory_types import MemoryOptions
from midus_hf.config.model_sizes import ModelSizes


@ByType
def flops(
    options: MemoryOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the floating-point operations of a memory in one layer and forward pass, its residual adds included.

    Args:
        options: Options of the memory, by whose class a type registers its count.
        sizes: Sizes of the model.
        batch: B, sequences in the batch.
        tokens: T, tokens per sequence.
        index: Number of the layer among the layers that have the memory, from 0.
        count: Number of layers that have the memory.

    Returns:
        Operations by the name of their purpose. `midus_hf.config.flops.rules` has the prices.

    Raises:
        ValueError: If the type of memory has registered no count.
    """
    raise ValueError(
        f"memory of type {options.type!r} does not say how many operations it takes; expected a function registered with "
        f"midus_hf.config.flops.memories.flops for {type(options).__name__}. Leave the memory out of the config to count the rest."
    )


@ByType
def values_read(options: MemoryOptions, sizes: ModelSizes) -> int | None:
    """Return the number of elements of the values that one token reads in one layer. Default: None, all elements."""
    return None


def norm_and_gate_flops(options: RetrievalOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query norm, the softmax over slots, the gate and the residual adds.

    The query norm has one price, whether its statistics come from features, from a batch or from running statistics.
    """
    queries, gates = rows * sizes.num_heads, sizes.num_heads if options.gate == "head" else 1
    gate = linear(rows, options.read_width(sizes), gates, bias=True) + rows * (gates * SIGMOID + sizes.hidden_size)
    return {
        "query norm": 0 if options.query_norm == "none" else layer_norm(queries, options.query_width(sizes)),
        "weights": queries * options.k * (SOFTMAX + (options.temperature != 1)),
        "gate": 0 if options.gate == "none" else gate,
        "residual adds": rows * sizes.hidden_size * (2 if options.adds_block_input else 1),
    }


@values_read.register
def _(options: SharedValueOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * sizes.hidden_size


def projection_and_values_flops(options: SharedValueOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query projection and of the weighted sum of values."""
    hidden = sizes.hidden_size
    return {
        "query projection": linear(rows, hidden, hidden),
        "values": linear(rows, sizes.num_heads * options.k, hidden),
    }


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Count the operations that find the k best pairs of sub-keys: k rows, k columns, then k of the k * k sums of both."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }


@values_read.register
def _(options: HeadwiseOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * (sizes.hidden_size // sizes.num_heads)


@flops.register
def _(options: HeadwiseOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    """Count the operations as `flops` does.

    Like the op, this applies transforms to the retrieved sum of each token, or to each row of the bank if rows are
    fewer.
    """
    rows, width = batch * tokens, sizes.hidden_size // sizes.num_heads
    transformed = min(rows, options.n * options.n) * sizes.num_heads if options.values == "expanded" else 0
    return {
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        "values": linear(rows * sizes.num_heads, options.k, width) + linear(transformed, width, width),
        **norm_and_gate_flops(options, sizes, rows),
    }


@flops.register
def _(options: LinearOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    """Count the operations as `flops` does. Every query is compared with every key of its head."""
    rows, queries = batch * tokens, batch * tokens * sizes.num_heads
    return {
        **projection_and_values_flops(options, sizes, rows),
        "scores": linear(queries, options.query_width(sizes), options.slots),
        "choice": top_k(queries, options.slots, options.k),
        **norm_and_gate_flops(options, sizes, rows),
    }


@flops.register
def _(
    options: ProductKeyOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does."""
    rows = batch * tokens
    return {
        **projection_and_values_flops(options, sizes, rows),
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        **norm_and_gate_flops(options, sizes, rows),
    }


@flops.register
def _(options: HierFFNOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    rows, units = batch * tokens, options.fetched_size
    return {
        "memory": 3 * linear(rows, sizes.hidden_size, units) + rows * units * (ACTIVATIONS[sizes.activation] + 1),
        "residual adds": rows * sizes.hidden_size,
    }


@flops.register
def _(options: HierLoraOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    rows, rank = batch * tokens, options.fetched_size
    widths = options.layer_projections(sizes).values()
    return {
        "memory": sum(
            linear(rows, inputs, rank) + linear(rows, rank, outputs) + 2 * rows * outputs for inputs, outputs in widths
        )
    }


@flops.register
def _(options: HierKVOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    width = sizes.num_heads * sizes.head_dim
    return {
        "memory": attention_products(batch, tokens, options.fetched_size, width)
        + attention_weights(batch, sizes.num_heads, tokens, options.fetched_size),
        "residual adds": batch * tokens * width,
    }


@values_read.register
def _(options: ChaptersOptions, sizes: ModelSizes) -> int:
    return (options.shared_chapters + options.k) * options.chapter_tokens * options.row_width(sizes)


@flops.register
def _(options: ChaptersOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    """Count the operations as `flops` does.

    For routing `sequence` and `prompt` the count is the paper's: memory tokens are weighted, normalised and
    projected for each sequence anew. With `chunk` and `token`, choices overlap: each memory token that is read is
    normalised and projected once, at most the whole bank, and weights scale scores and weighted sums instead.
    Chunks are pooled by a running sum, divided once per chunk. A factored bank is multiplied out once per layer, a
    quantised bank is scaled where it is read. The router's losses count as in the paper; turning its probabilities
    into weights does not count.
    """
    hidden, width, heads, rows = sizes.hidden_size, options.width(sizes), options.num_heads(sizes), batch * tokens
    chunks = math.ceil(tokens / options.chunk_size) + (options.first_tokens < min(tokens, options.chunk_size))
    stretches = {"chunk": chunks, "token": tokens}.get(options.routing, 1)
    choices, selected = batch * stretches, (options.shared_chapters + options.k) * options.chapter_tokens
    read = choices * selected if stretches == 1 else min(choices * selected, options.memory_tokens)
    scores = heads * rows * selected
    pooling = 0 if options.routing == "token" else batch * hidden * (tokens - 1) + choices * hidden
    weighting = {
        "released": read * width if stretches == 1 else 2 * scores,
        "logit_bias": choices * (options.shared_chapters + options.k) + scores,
        "paper": 0,
    }
    read_width = width // heads * options.num_kv_heads(sizes)
    return {
        "router": pooling
        + linear(choices, hidden, options.chapters)
        + choices * options.chapters * SOFTMAX
        + top_k(choices, options.chapters, options.k),
        "router losses": router_losses(choices, options.chapters, options.k),
        "bank": (0 if options.bank_rank is None else linear(options.memory_tokens, options.bank_rank, hidden))
        + (0 if options.bank_bits is None else read * options.row_width(sizes)),
        "memory tokens": weighting[options.weighting] + (rms_norm(read, width) if options.normalise else 0),
        "attention": linear(rows, hidden, width)
        + 2 * linear(read, width, read_width)
        + linear(rows, width, hidden)
        + attention_products(batch, tokens, selected, width)
        + attention_weights(batch, heads, tokens, selected),
        "norms": rms_norm(rows, hidden),
        "residual adds": rows * hidden,
    }


@values_read.register
def _(options: UltraMemOptions, sizes: ModelSizes) -> int:
    widths = options.width("value_width", sizes) + options.width("pre_value_width", sizes)
    return options.heads * options.k * widths


@flops.register
def _(options: UltraMemOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
    """Count the operations as `flops` does.

    Keys are normalised once per pass. Finding the leading singular vectors of cores does not count.
    """
    rows, hidden, key_width = batch * tokens, sizes.hidden_size, options.width("key_width", sizes)
    value_width, pre_width = options.width("value_width", sizes), options.width("pre_value_width", sizes)
    vectors, pairs, slots = (
        options.heads * options.rank,
        options.heads * options.key_pairs**2,
        rows * options.heads * options.k,
    )
    keys, grid = options.key_pairs * options.keys, options.side**2
    tucker = options.scoring == "tucker"
    first = 2 * rows * pairs * (2 * options.rank * options.keys + top_k(1, options.keys, options.side))
    second = rows * pairs * (2 * options.side * options.rank**2 + 2 * grid * options.rank)
    if not tucker:
        first, second = 2 * rows * pairs * top_k(1, options.keys, options.side), rows * pairs * grid
    activation = 0 if options.activation == "none" else ACTIVATIONS[options.activation]
    gate = linear(rows, hidden, value_width) + rows * value_width * (ACTIVATIONS["silu"] + 1)
    return {
        "queries": linear(rows, hidden, 2 * vectors * key_width)
        + (rms_norm(2 * vectors * (rows + keys), key_width) if tucker else 0),
        "scores": 2 * linear(rows * vectors, key_width, keys),
        "choice": first + second + top_k(rows * options.heads, options.key_pairs**2 * grid, options.k),
        "weights": slots * SOFTMAX if options.weights == "softmax" else 0,
        "pre-values": (linear(rows, hidden, pre_width) + slots * (2 * pre_width + activation + 1)) if pre_width else 0,
        "values": 2 * slots * value_width,
        "gate": gate if options.output_gate else 0,
        "output projection": linear(rows, options.num_projected * value_width, hidden),
        "residual adds": rows * hidden,
    }


@flops.register
def _(
    options: DepthAttentionOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    slots, width = options.num_read(index), sizes.num_heads * sizes.head_dim
    written = sum(1 for source in options.projected if options.is_read(Slot(index, source), count))
    key_width = sizes.num_key_value_heads * sizes.head_dim
    return {
        "depth attention": attention_products(batch, tokens, slots, width)
        + attention_weights(batch, sizes.num_heads, tokens, slots),
        "slot projections": 2 * written * linear(batch * tokens, sizes.hidden_size, key_width, options.bias),
    }
