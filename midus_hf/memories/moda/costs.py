"""FLOPs of attention over the depth."""

from midus_hf.config.flops import attention_products, attention_weights, linear
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.flops import flops_of
from midus_hf.memories.moda.options import DepthAttentionOptions


@flops_of(DepthAttentionOptions)
def depth_attention_flops(
    options: DepthAttentionOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    slots, width = len(options.slots_read(index)), sizes.num_heads * sizes.head_dim
    written = len(options.projected) if index + 1 < count else 0
    key_width = sizes.num_key_value_heads * sizes.head_dim
    return {
        "depth attention": attention_products(batch, tokens, slots, width)
        + attention_weights(batch, sizes.num_heads, tokens, slots),
        "slot projections": 2 * written * linear(batch * tokens, sizes.hidden_size, key_width, options.bias),
    }
