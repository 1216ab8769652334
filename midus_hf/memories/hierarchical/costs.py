"""FLOPs of hierarchical memories."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import ACTIVATIONS, attention_products, attention_weights, flops_of, linear
from midus_hf.memories.hierarchical.options import HierFFNOptions, HierKVOptions, HierLoraOptions


@flops_of(HierFFNOptions)
def hier_ffn_flops(
    options: HierFFNOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    rows, units = batch * tokens, options.fetched_size
    return {
        "memory": 3 * linear(rows, sizes.hidden_size, units) + rows * units * (ACTIVATIONS[sizes.activation] + 1),
        "residual adds": rows * sizes.hidden_size,
    }


@flops_of(HierLoraOptions)
def hier_lora_flops(
    options: HierLoraOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    rows, rank = batch * tokens, options.fetched_size
    widths = options.layer_projections(sizes).values()
    return {
        "memory": sum(
            linear(rows, inputs, rank) + linear(rows, rank, outputs) + 2 * rows * outputs for inputs, outputs in widths
        )
    }


@flops_of(HierKVOptions)
def hier_kv_flops(
    options: HierKVOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    width = sizes.num_heads * sizes.head_dim
    return {
        "memory": attention_products(batch, tokens, options.fetched_size, width)
        + attention_weights(batch, sizes.num_heads, tokens, options.fetched_size),
        "residual adds": batch * tokens * width,
    }
