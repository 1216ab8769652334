"""Mixture-of-Depths Attention: heads that also read what earlier layers wrote at the same position."""

from midus_hf.config.errors import RequestError
from midus_hf.memories.moda.options import ModaOptions
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod


@register_method("moda")
class MoDA(AttachedMemoryMethod):
    """Attention heads that also read keys and values of earlier layers at the same position."""

    summary = "heads that also read, at their own position, what earlier layers wrote (identity at start)"
    paper = Paper(
        key="moda",
        title="Mixture-of-Depths Attention",
        authors=(
            "Zhu, Lianghui and Fang, Yuxin and Liao, Bencheng and Wang, Shijie and Cheng, Tianheng and Huang, Zilong and "
            "Chen, Chen and Wei, Lai and Zeng, Yutao and Wang, Ya and Lin, Yi and Li, Yu and Wang, Xinggang"
        ),
        year=2026,
        reference="arXiv:2603.15619",
    )
    identity = True
    memory_options = ModaOptions

    def check(self, base: BaseCheckpoint) -> None:
        super().check(base)
        if self.options.joining == "joint":
            raise RequestError(
                "joining is 'joint', with which the new slots change what the base computes; expected added or interpolated. It is "
                "for models that are trained from scratch, whose config has it."
            )
        if self.options.joining == "added" and self.options.attention_slots == "reused":
            raise RequestError(
                "attention_slots is 'reused' and joining is 'added', which adds values of earlier layers that are not zero to what "
                "the base computes; expected attention_slots none or projected, or joining interpolated."
            )
        self._memory().check_layers(self.layers(base))
