"""Mixture of Chapters: a routed bank of latent memory tokens, attached to some layers."""

from dataclasses import replace

from midus_hf.memories.moc.options import MocOptions
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, Surgery, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan import Plan


@register_method("moc")
class MixtureOfChapters(AttachedMemoryMethod):
    """Cross-attention of layers to chapters of a bank, which a router chooses for their tokens."""

    summary = (
        "a bank of memory tokens in chapters, read by cross-attention in a quarter of the layers (identity at start)"
    )
    paper = Paper(
        key="mixtureofchapters",
        title="Mixture of Chapters: Scaling Learnt Memory in Transformers",
        authors="Tibrewal, Tasmay Pankaj and Saha, Pritish and Meda, Ankit and Singh, Kunal and Moturi, Pradeep",
        year=2026,
        reference="ICLR 2026 Workshop on New Frontiers in Associative Memories",
        booktitle="ICLR Workshop on New Frontiers in Associative Memories",
    )
    identity = True
    memory_options = MocOptions
    default_layers = 0.25

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        surgery = super().surgery(base, plan, seed)
        if not self.options.reads_ahead:
            return surgery
        warning = (
            "routing is 'sequence', so chapters are chosen by all tokens of a text, later ones included, and the model is not "
            "causal: its loss and perplexity are measured with a view of the tokens to be predicted, and generation recomputes every "
            "token for each new one. Choose routing = 'chunk' or 'token' for a model that has to generate."
        )
        return replace(surgery, warnings=(warning,))
