"""Options of the memory: there is nothing to choose."""

from dataclasses import dataclass

from midus_hf.memories.options import MemoryOptions, package_only
from midus_hf.memories.registry import register_memory


@register_memory("offset")
@dataclass(kw_only=True)
class OffsetOptions(MemoryOptions):
    """Options of a vector that lies next to the weights."""

    sites = ("behind-layer",)

    def tensors(self, sizes):
        return {}

    @classmethod
    @package_only
    def memory_files(cls):
        from tests.upscalers.offset.bank_files import OffsetFile

        return OffsetFile
