"""UltraMemV2: a large table of values beside every feed-forward network."""

from midus_hf.config.memories.ultramem import UltraMemOptions
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import ULTRAMEM_V2, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan.plan import Plan
from upscalers.request.errors import RequestError


@register_method("ultramem-v2")
class UltraMemV2(AttachedMemoryMethod):
    """Memories beside every feed-forward network that retrieve slots of a large table."""

    summary = "a large value table beside every feed-forward network, retrieved by Tucker-decomposed keys (identity at start)"
    paper = ULTRAMEM_V2
    identity = True
    memory_options = UltraMemOptions
    default_layers = "all"

    def check(self, base: BaseModel) -> None:
        super().check(base)
        if self.options.zero == "none":
            raise RequestError(
                "zero is 'none', with which the new memory changes what the base computes; expected values or projection. It is for "
                "models that are trained from scratch, whose config has it."
            )

    def concerns(self, base: BaseModel, plan: Plan) -> list[str]:
        memory: UltraMemOptions = self.options
        unread = memory.unread_rows(len(self.layers(base)))
        if not unread:
            return []
        rows = memory.sharing.group * memory.n**2
        return [
            f"share is {memory.share!r}, so a layer has {memory.keys:,} keys a side and reads {memory.num_rows:,} of the {rows:,} "
            f"rows of its tables: {unread:,} rows are stored that no layer reads. Choose a square number of tables, such as 4 or 9, "
            "or ring, in which other layers read them."
        ]
