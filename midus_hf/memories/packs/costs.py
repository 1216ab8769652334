"""FLOPs of packs, for tokens that read as many packs as options allow, of `TOKENS` tokens each."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import attention_products, attention_weights, flops_of
from midus_hf.memories.packs.options import PacksOptions

TOKENS = 128


@flops_of(PacksOptions)
def packs_flops(
    options: PacksOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    slots, width = options.open * TOKENS, sizes.num_heads * sizes.head_dim
    return {
        "packs": attention_products(batch, tokens, slots, width)
        + attention_weights(batch, sizes.num_heads, tokens, slots)
    }
