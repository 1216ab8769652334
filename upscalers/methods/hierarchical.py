"""Hierarchical memories: a bank next to the checkpoint, from which texts fetch blocks."""

from midus_hf.memories.hierarchical.options import (
    HierFFNOptions,
    HierKVOptions,
    HierLoraFFNOptions,
    HierLoraQKOptions,
    HierLoraVOOptions,
)
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod

_FETCHED = "fetched for a text from a bank by its topic (identity at start)"


class FetchedMemoryMethod(AttachedMemoryMethod):
    """Method whose layers also compute with blocks that texts fetch, one per level of a tree of topics."""

    paper = Paper(
        key="hierarchicalmemories",
        title="Pretraining with Hierarchical Memories: Separating Long-Tail and Common Knowledge",
        authors="Pouransari, Hadi and Grangier, David and Thomas, C and Kirchhof, Michael and Tuzel, Oncel",
        year=2026,
        reference="arXiv:2510.02375",
        booktitle="International Conference on Learning Representations",
    )
    identity = True


@register_method("hier-ffn")
class HierFFN(FetchedMemoryMethod):
    """Fetched hidden units that widen every feed-forward network."""

    summary = f"hidden units of every feed-forward network, {_FETCHED}"
    memory_options = HierFFNOptions


@register_method("hier-kv")
class HierKV(FetchedMemoryMethod):
    """Fetched keys and values that every token attends to in addition to the sequence."""

    summary = f"keys and values in addition to those of the sequence, {_FETCHED}"
    memory_options = HierKVOptions


@register_method("hier-lora-ffn")
class HierLoraFFN(FetchedMemoryMethod):
    """Fetched low-rank factors that are added to the projections of the feed-forward networks."""

    summary = f"low-rank factors of every feed-forward network, {_FETCHED}"
    memory_options = HierLoraFFNOptions


@register_method("hier-lora-qk")
class HierLoraQK(FetchedMemoryMethod):
    """Fetched low-rank factors that are added to the query and key projections."""

    summary = f"low-rank factors of query and key projections, {_FETCHED}"
    memory_options = HierLoraQKOptions


@register_method("hier-lora-vo")
class HierLoraVO(FetchedMemoryMethod):
    """Fetched low-rank factors that are added to the value and output projections."""

    summary = f"low-rank factors of value and output projections, {_FETCHED}"
    memory_options = HierLoraVOOptions
