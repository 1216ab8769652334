"""Linear, or flat, memory, a baseline of MIDUS: a key per slot and head, and values that all heads read."""

from dataclasses import dataclass

from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.memories.retrieval import RANDOM_SLOTS, SharedValueOptions, key_initial
from midus_hf.config.memory_types import register_memory_type
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option


@register_memory_type("linear")
@dataclass(kw_only=True)
class LinearOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 4 and 5)."""

    controls = {"one-row": {"slots": 1, "k": 1}, **RANDOM_SLOTS}

    slots: int = option(4096, "number of values, and of keys per head")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = self.query_width(sizes)
        return {
            **self.norm_and_gate(sizes),
            **self.projection_and_values(sizes, self.slots),
            "slot_keys": DeclaredTensor((sizes.num_heads, self.slots, width), "key", key_initial(width)),
        }
