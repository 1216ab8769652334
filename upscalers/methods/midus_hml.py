"""MIDUS with head-wise memory, the paper's own."""

from dataclasses import dataclass
from typing import Literal

from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.memory_block import MemoryMethod, RetrievalOptions
from upscalers.request.errors import RequestError
from upscalers.request.options import option


@dataclass
class HeadwiseMemoryOptions(RetrievalOptions):
    """Size and kind of the memory of each head."""

    n: int = option(64, "sub-keys per side; every head addresses n * n slots")
    values: Literal["expanded", "shared", "own"] = option(
        "expanded",
        "expanded: one bank that each head transforms (HIVE); shared: one bank, read as it is; own: a bank per head",
    )
    output_projection: bool = option(False, "whether the attention in front keeps its output projection")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_slots("n", "sub-key a side")


@register_method("midus-hml")
class MidusHml(MemoryMethod):
    """Each attention head asks a memory of its own (section 4.2)."""

    summary = "memory blocks: attention of the next layer, then a product-key memory per head (identity at start)"
    options_class = HeadwiseMemoryOptions
    memory_type = "headwise"

    def check(self, base: BaseModel) -> None:
        super().check(base)
        self.check_halves(base)
        hidden = base.config["hidden_size"]
        width = base.family.num_heads(base.config) * base.family.head_dim(base.config)
        if self.options.inner_residual and not self.options.output_projection and width != hidden:
            raise RequestError(
                f"inner_residual adds the block's input of width {hidden} to an attention output of width {width}; expected "
                "equal widths. Set output_projection to true as well."
            )
