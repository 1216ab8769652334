"""UltraMemV2: a large table of values in parallel to every feed-forward network."""

from midus_hf.config.errors import RequestError
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod


@register_method("ultramem-v2")
class UltraMemV2(AttachedMemoryMethod):
    """Memories in parallel to every feed-forward network that retrieve slots of a large table."""

    summary = "a large value table in parallel to every feed-forward network, read by Tucker-decomposed keys (identity at start)"
    paper = Paper(
        key="ultramemv2",
        title="UltraMemV2: Memory Networks Scaling to 120B Parameters with Superior Long-Context Learning",
        authors=(
            "Huang, Zihao and Bao, Yu and Min, Qiyang and Chen, Siyan and Guo, Ran and Huang, Hongzhi and Zhu, Defa and "
            "Zeng, Yutao and Wu, Banggu and Zhou, Xun and Qiao, Siyuan"
        ),
        year=2025,
        reference="arXiv:2508.18756",
    )
    identity = True
    memory_options = UltraMemV2Options

    def check(self, base: BaseCheckpoint) -> None:
        super().check(base)
        if self.options.zero == "none":
            raise RequestError(
                "zero is 'none', with which the new memory changes what the base computes; expected values or projection. It is for "
                "models that are trained from scratch, whose config has it."
            )
