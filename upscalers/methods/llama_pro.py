"""LLaMA-Pro: copies of layers that are the identity at first."""

from dataclasses import dataclass

from midus_hf.config.options import option
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.dense_block import IDENTITY_HELP, DenseMethod, IdentityInit, whole_layer
from upscalers.plan import New


@dataclass
class LlamaProOptions:
    """Options of `llama-pro`: how a copy becomes the identity."""

    identity: IdentityInit = option("auto", IDENTITY_HELP)


@register_method("llama-pro")
class LlamaPro(DenseMethod):
    """Block expansion (section 3.2): a copy of each group's last layer after it, made the identity."""

    summary = "block expansion: copies of evenly spaced layers, made the identity"
    paper = Paper(
        key="llamapro",
        title="LLaMA Pro: Progressive LLaMA with Block Expansion",
        authors="Wu, Chengyue and Gan, Yukang and Ge, Yixiao and Lu, Zeyu and Wang, Jiahao and Feng, Ye and Shan, Ying and Luo, Ping",
        year=2024,
        reference="arXiv:2401.02415",
    )
    options_class = LlamaProOptions
    identity = True
    default_placement = "llama-pro"

    def sources(self, base: BaseCheckpoint, layer: New, index: int) -> tuple[int, ...]:
        source = layer.previous if layer.previous is not None else layer.next
        assert source is not None
        return (whole_layer(base, source, index),)
