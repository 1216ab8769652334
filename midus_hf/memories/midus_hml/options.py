"""Head-wise memory (HML) of MIDUS: a product-key memory per attention head (section 4.2)."""

import math
from dataclasses import dataclass

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes, Normal
from midus_hf.config.options import option
from midus_hf.memories.registry import register_memory
from midus_hf.memories.retrieval.options import (
    RANDOM_SLOTS,
    RetrievalOptions,
    sub_keys,
)


@register_memory("midus-hml")
@dataclass(kw_only=True)
class MidusHmlOptions(RetrievalOptions):
    """Size of the memory: one bank of values, which each head transforms (HIVE).

    Values start at zero, so that the memory returns zero. Keys and transforms start non-zero, so that gradients reach the values;
    the paper does not give theirs. Transforms are normal with variance 1 / v, which keeps the scale of a value.
    """

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses n * n slots")
    output_projection: bool = option(False, "whether the attention in front keeps its output projection")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        heads, slots, width = sizes.num_heads, self.n * self.n, sizes.hidden_size // sizes.num_heads
        return {
            **self.norm_tensors(sizes),
            **sub_keys(heads, self.n, self.query_width(sizes)),
            "value_bank": DeclaredTensor((slots, width), "value", ZEROS),
            "value_transform": DeclaredTensor((heads, width, width), "transform", Normal(1.0 / math.sqrt(width))),
        }
