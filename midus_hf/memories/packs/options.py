"""Packs: keys and values of an entry's text, which tokens attend to from its name on; their file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.memories.bank import MemoryFiles
from midus_hf.memories.flops import attention_products, attention_weights
from midus_hf.memories.options import MemoryOptions, definition_in, head_projections, package_only
from midus_hf.memories.registry import Memories, register_memory


@register_memory("packs")
@dataclass(kw_only=True)
class PacksOptions(MemoryOptions):
    """How packs are read. Texts are in the checkpoint's `glossary.jsonl`; the memory has no tensors."""

    sites = ("inside-attention",)
    attends = True

    open: int = option(2, "maximum entries that a token reads as one text, the last named first")
    score_bias: float = option(
        0.4,
        "number added to the scores of packs before the softmax; 0: packs are read as if their texts stood in front",
    )
    chat_score_bias: float = option(1.1, "the same in a chat")
    distance: int = option(
        4, "positions between a pack and the last token of its name; 0: the pack ends right before it"
    )
    links: bool = option(
        True, "whether entries that an open entry's text names open too, where fewer than `open` are open"
    )
    max_tokens: int = option(128, "maximum tokens that are read of an entry's text")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {}

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        return head_projections(sizes)

    def check(self) -> None:
        least = {
            "open": (1, "at least one entry"),
            "max_tokens": (1, "at least one token"),
            "distance": (0, "0 or more positions"),
        }
        for name, (number, expected) in least.items():
            if getattr(self, name) < number:
                raise RequestError(f"{name} is {getattr(self, name)}; expected {expected}.")

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        slots, width = self.open * _TOKENS_PER_PACK, sizes.num_heads * sizes.head_dim
        return {
            "packs": attention_products(batch, tokens, slots, width)
            + attention_weights(batch, sizes.num_heads, tokens, slots)
        }

    @classmethod
    @package_only
    def memory_files(cls) -> Any:
        return GlossaryFile

    @classmethod
    @package_only
    def paged_layer(cls) -> Any:
        return definition_in("midus_hf.memories.packs.paged", "PagedPacksMemory")


class GlossaryFile(MemoryFiles):
    """The glossary, one file in the folder of the weights."""

    files = (GLOSSARY_FILE,)

    def create(self, folder: Path, dtype: str, seed: int) -> None:
        """Create a glossary without entries."""
        (folder / GLOSSARY_FILE).write_bytes(b"")

    def copy(self, source: Path, folder: Path) -> None:
        """Copy the glossary; a `RequestError` if there is none."""
        path = source / GLOSSARY_FILE
        if not path.is_file():
            raise RequestError(
                f"there is no {GLOSSARY_FILE} in {source}; expected one next to the weights. Copy the model's whole folder."
            )
        (folder / GLOSSARY_FILE).write_bytes(path.read_bytes())


def has_glossary(memories: Memories) -> bool:
    """Return whether a model reads names and texts from a glossary."""
    return any(isinstance(entry.options, PacksOptions) for entry in memories.attached.values())


_TOKENS_PER_PACK = 128  # that FLOPs are counted for
