"""Needs of a model's memories. The model, and the code that a checkpoint carries, leave out everything else."""

from collections.abc import Iterable
from dataclasses import dataclass

from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import MemoryModule


@dataclass(frozen=True)
class Needs:
    """Needs of the memories of a model, each true if at least one memory has the need.

    Args:
        inserted: Layers are inserted for a memory.
        attached: Memories are attached to layers of the base.
        inside_attention: A memory works inside attention, which replaces the family's attention class.
        inside_ffn: A memory works inside feed-forward networks, which replaces the family's class.
        adapters: A memory changes outputs of projections.
        heads: A memory changes outputs of attention heads.
        depth: Heads attend to slots that earlier layers wrote.
        behind_attention: A memory adds to the residual stream behind attention.
        beside_ffn: A memory adds to outputs of feed-forward networks.
        behind_layer: A memory adds to the residual stream behind a layer.
        skips: A memory reads at one layer, and adds the result behind another.
        tables: Layers share tables.
        banks: Texts fetch blocks from a bank.
        states: A memory keeps a state of the sequence in the cache.
        places: A memory needs to know padding and documents.
        reports: Routers report their logits and losses.
        arguments: Memories ask for arguments of the pass by name.
        prompts: A memory needs to know which tokens are the prompt.
        whole: A memory reads the whole sequence, including later tokens.
        narrow: Projections that write to the residual stream start with a smaller standard deviation.
    """

    inserted: bool = False
    attached: bool = False
    inside_attention: bool = False
    inside_ffn: bool = False
    adapters: bool = False
    heads: bool = False
    depth: bool = False
    behind_attention: bool = False
    beside_ffn: bool = False
    behind_layer: bool = False
    skips: bool = False
    tables: bool = False
    banks: bool = False
    states: bool = False
    places: bool = False
    reports: bool = False
    arguments: bool = False
    prompts: bool = False
    whole: bool = False
    narrow: bool = False

    @property
    def carries(self) -> bool:
        """True if layers pass tensors on to later layers."""
        return self.skips or self.depth

    @property
    def added(self) -> bool:
        """True if a memory adds its result to what a layer computes."""
        return self.behind_attention or self.beside_ffn or self.behind_layer

    @property
    def inputs(self) -> bool:
        """True if a pass has more inputs for memories than hidden states."""
        return self.attached or self.banks or self.states or self.places or self.reports or self.arguments


def needs_of(hosted: Iterable[tuple[MemoryEntry, MemoryModule]], sizes: ModelSizes) -> Needs:
    """Return the needs of the memories that a model, or a layer, hosts.

    Args:
        hosted: Each memory's entry in the config, and the memory's module in one layer.
        sizes: Sizes of the model.
    """
    hosted = list(hosted)
    entries, modules = [entry for entry, _ in hosted], [module for _, module in hosted]
    sites = {entry.site for entry in entries}
    keywords = {keyword for module in modules for keyword in module.context}
    attached = [entry.options for entry in entries if entry.is_attached]
    return Needs(
        inserted="inserted" in sites,
        attached=bool(attached),
        inside_attention="inside-attention" in sites,
        inside_ffn="inside-ffn" in sites,
        adapters=any(module.projections for module in modules),
        heads=any(module.reads_heads for module in modules),
        depth=any(options.attends for options in attached),
        behind_attention="behind-attention" in sites,
        beside_ffn="beside-ffn" in sites,
        behind_layer="behind-layer" in sites,
        skips="skip" in sites,
        tables=any(entry.options.tables(sizes, entry.layers) for entry in entries if entry.is_attached),
        banks=any(options.fetched(sizes) is not None for options in attached),
        states=any(module.keeps_state for module in modules),
        places="tokens" in keywords,
        reports="report" in keywords,
        arguments=any(module.forward_arguments for module in modules),
        prompts=any("prompt_mask" in module.forward_arguments for module in modules),
        whole=any(module.reads_ahead for module in modules),
        narrow=any(options.narrows_start for options in attached),
    )
