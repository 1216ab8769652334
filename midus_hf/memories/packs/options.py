"""Packs: keys and values of an entry's text, which tokens attend to from the entry's name on."""

from dataclasses import dataclass

from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option
from midus_hf.memories.options import MemoryOptions, head_projections
from midus_hf.memories.registry import register_memory


@register_memory("packs")
@dataclass(kw_only=True)
class PacksOptions(MemoryOptions):
    """How packs are read. The texts are in the checkpoint's folder (`glossary.jsonl`), and the memory has no tensors."""

    sites = ("inside-attention",)
    attends = True

    open: int = option(2, "entries that a token reads at most, the latest named in front of it, as one text")
    score_bias: float = option(
        0.4,
        "number added to the scores of packs before the softmax; 0: packs are read as if their texts stood in front",
    )
    chat_score_bias: float = option(1.1, "the same in a chat")
    distance: int = option(
        4,
        "positions between a pack and the last token of its name, wherever the name stands; 0: the pack ends right before that token",
    )
    links: bool = option(
        True, "whether entries that an open entry's text names open too, where fewer than `open` are open"
    )
    max_tokens: int = option(128, "tokens of an entry's text that are read at most")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {}

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        return head_projections(sizes)

    def check(self) -> None:
        for name, least, what in (("open", 1, "at least one entry"), ("max_tokens", 1, "at least one token")):
            if getattr(self, name) < least:
                raise RequestError(f"{name} is {getattr(self, name)}; expected {what}.")
        if self.distance < 0:
            raise RequestError(f"distance is {self.distance}; expected 0 or more positions.")
