"""Packs: keys and values of an entry's text, which tokens attend to from the entry's name on."""

from dataclasses import dataclass

from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.fetched_blocks import PackLayout
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option
from midus_hf.memories.entries import Memories
from midus_hf.memories.options import MemoryOptions, head_projections
from midus_hf.memories.registry import register_memory


@register_memory("packs")
@dataclass(kw_only=True)
class PacksOptions(MemoryOptions):
    """How many packs a token reads. The packs lie in a bank beside the checkpoint, and the memory has no tensors of its own."""

    sites = ("inside-attention",)
    attends = True

    open: int = option(2, "names whose packs a token reads at most, the latest in front of it")
    score_bias: float = option(
        1.0,
        "number added to the scores of packs before the softmax; 0: packs are read as if their texts stood in front",
    )

    distance: int = option(
        4,
        "positions between a pack and the last token of its name, wherever the name stands; 0: the pack ends right before that token",
    )

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {}

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        return head_projections(sizes)

    def check(self) -> None:
        if self.open < 1:
            raise ValueError(f"open is {self.open}; expected at least one name.")
        if self.distance < 0:
            raise ValueError(f"distance is {self.distance}; expected 0 or more positions.")


def pack_layouts(memories: Memories) -> dict[str, PackLayout]:
    """Return the layout of each bank of packs, by the name of the memory."""
    sizes = memories.sizes
    return {
        name: PackLayout(entry.options.type, entry.layers, sizes.num_key_value_heads, sizes.head_dim, memories.base)
        for name, entry in memories.attached.items()
        if isinstance(entry.options, PacksOptions)
    }
