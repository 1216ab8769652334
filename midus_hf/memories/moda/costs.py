"""FLOPs of attention over the depth."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import attention_products, attention_weights, flops_of, linear
from midus_hf.memories.moda.options import ModaOptions


@flops_of(ModaOptions)
def moda_flops(
    options: ModaOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    slots, width = len(options.slots_read(index)), sizes.num_heads * sizes.head_dim
    written = len(options.projected) if index + 1 < count else 0
    key_width = sizes.num_key_value_heads * sizes.head_dim
    return {
        "depth attention": attention_products(batch, tokens, slots, width)
        + attention_weights(batch, sizes.num_heads, tokens, slots),
        "slot projections": 2 * written * linear(batch * tokens, sizes.hidden_size, key_width, options.bias),
    }
