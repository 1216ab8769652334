"""What the memories of a model need of it: a model does without the rest, and so does the code that a checkpoint carries."""

from collections.abc import Iterable
from dataclasses import dataclass

from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import MemoryModule


@dataclass(frozen=True)
class Needs:
    """What the memories of a model need of it.

    Args:
        inserted: Layers that were inserted for a memory.
        attached: Layers of the base that memories are attached to.
        inside_attention: Attention is another than the family's.
        inside_ffn: Feed-forward networks are others than the family's.
        adapters: What projections give is changed.
        heads: What heads give is changed.
        depth: Heads attend to what earlier layers wrote.
        behind_attention: Something is added to the residual stream behind attention.
        beside_ffn: Something is added to what feed-forward networks give.
        behind_layer: Something is added to the residual stream behind a layer.
        skips: What was read at one layer is added behind another.
        tables: Tables that layers share.
        banks: Blocks that texts fetch from a bank.
        states: What is kept of a sequence, in the cache.
        places: Where tokens stand: padding, and documents.
        reports: What routers do is told, and adds losses.
        arguments: Arguments of the pass that memories ask for by name.
        prompts: Which tokens are the prompt.
        whole: The whole sequence is looked at, later tokens included.
        narrow: Projections that write to the residual stream start narrower.
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
        """Whether layers give something for later ones."""
        return self.skips or self.depth

    @property
    def added(self) -> bool:
        """Whether something is added beside what the layer computes."""
        return self.behind_attention or self.beside_ffn or self.behind_layer

    @property
    def inputs(self) -> bool:
        """Whether a pass brings anything to memories beside hidden states."""
        return self.attached or self.banks or self.states or self.places or self.reports or self.arguments


def needs_of(hosted: Iterable[tuple[MemoryEntry, MemoryModule]], sizes: ModelSizes) -> Needs:
    """Return what memories need of the model, or of the layer, that hosts them.

    Args:
        hosted: Each memory's entry and a module of it, as it is in one layer.
        sizes: Of the model.
    """
    hosted = list(hosted)
    entries, modules = [entry for entry, _ in hosted], [module for _, module in hosted]
    sites = {entry.site for entry in entries}
    asked = {what for module in modules for what in module.asks}
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
        places="tokens" in asked,
        reports="report" in asked,
        arguments=any(module.inputs for module in modules),
        prompts=any("prompt_mask" in module.inputs for module in modules),
        whole=any(module.reads_ahead for module in modules),
        narrow=any(options.narrows_start for options in attached),
    )
