"""Product-key memory (PKM), a baseline of MIDUS: sub-keys per head, and values that all heads read."""

from dataclasses import dataclass

from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.memories.retrieval import RANDOM_SLOTS, SharedValueOptions, sub_keys
from midus_hf.config.memory_types import register_memory_type
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option


@register_memory_type("product-key")
@dataclass(kw_only=True)
class ProductKeyOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses the same n * n values")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {
            **self.norm_and_gate(sizes),
            **self.projection_and_values(sizes, self.n * self.n),
            **sub_keys(sizes.num_heads, self.n, self.query_width(sizes)),
        }
