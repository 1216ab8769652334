"""What a loaded model is made of, and what `upscale` added to its base: found in one place, from the model and its record."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError
from midus_hf.memories.entries import ATTACHED, NO_MEMORIES, TABLES, Memories
from midus_hf.memories.hierarchical.fetching import Banks
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.watched_models import depth_heads


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Args:
        name: Name of the part in tables.
        kind: `block`: a layer that was inserted for a memory; `layer`: an inserted ordinary layer of the family; `memory`: a
            memory that is attached to layers; `depth`: the reading of the depth by a layer's heads; `bank`: a memory in all layers
            that share a bank; `all`: all added parts together.
        layers: Indices of the decoder layers.
        memory: Name of the attached memory; empty for layers. Default: empty.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    memory: str = ""


class ModelView:
    """A loaded model, and what the last upscaling added to its base. It holds modules, and must not outlive a change of them.

    Args:
        model: A causal language model, a model with another head, or either within PEFT, whose decoder has `layers`.
    """

    def __init__(self, model: Any):
        self.model = model
        self.decoder: Any = decoder_of(model)
        self.layers: nn.ModuleList = self.decoder.layers
        #: What `upscale` recorded in the config; None for another model.
        self.recorded = record_of(model.config)

    @property
    def record(self) -> UpscaleRecord:
        """What `upscale` recorded in the config; empty for another model."""
        return self.recorded or UpscaleRecord()

    @property
    def banks(self) -> Banks | None:
        """Banks that memories fetch blocks from; None if none does."""
        return getattr(self.model, "banks", None)

    @property
    def adds_bank(self) -> bool:
        """Whether a memory that was added fetches blocks."""
        return self.banks is not None and not self.banks.layouts.keys().isdisjoint(self.record.new_memories)

    @property
    def has_adapters(self) -> bool:
        """Whether PEFT has wrapped the model."""
        return has_adapters(self.model)

    @cached_property
    def memories(self) -> Memories:
        """The memories that the config lists."""
        config = self.model.config.get_text_config()
        return config.memories() if hasattr(config, "memories") else NO_MEMORIES

    @cached_property
    def new_modules(self) -> dict[str, nn.Module]:
        """Layers and memories that were added to the base, and tables that layers share, by name; may be empty.

        Raises:
            RequestError: If the record names a layer or a memory that the model does not have.
        """
        outside = [layer for layer in self.record.new_layers if not 0 <= layer < len(self.layers)]
        if outside:
            raise RequestError(
                f"upscale.new_layers of the config names {outside}, which the model does not have. Upscale the base again."
            )
        modules = dict(self.model.named_modules())
        name_of_stack = next(name for name, module in modules.items() if module is self.layers)
        new: dict[str, nn.Module] = {
            f"{name_of_stack}.{layer}": self.layers[layer] for layer in sorted(self.record.new_layers)
        }
        for memory in self.record.new_memories:
            attached = {
                name: module
                for name, module in modules.items()
                if name.endswith(f".{ATTACHED}.{memory}") or name.rpartition(".")[0].endswith(f".{TABLES}.{memory}")
            }
            if not attached:
                raise RequestError(
                    f"upscale.new_memories of the config names {memory!r}, which the model does not have. Upscale the base again."
                )
            new |= attached
        return new

    @property
    def task_head(self) -> list[nn.Module]:
        """Modules of a head that the base lacks; none for a language model, which has the base's head, or a bare stack."""
        if self.decoder is self.model or self.model.get_output_embeddings() is not None:
            return []
        return [module for module in self.model.children() if module is not self.decoder]

    @cached_property
    def parts(self) -> list[Part]:
        """Parts that were added, or all memories without a record: one by one in the order of layers, then banks of several layers.

        Raises:
            RequestError: If nothing was added.
        """
        inserted = {*(self.memories.inserted if self.recorded is None else self.record.new_layers)}
        names = {*(self.memories.attached if self.recorded is None else self.record.new_memories)}
        parts: list[Part] = []
        for layer, block in enumerate(self.layers):
            if layer in inserted:
                kind = "block" if layer in self.memories.inserted else "layer"
                parts.append(Part(f"{kind} {layer}", kind, (layer,)))
            for name in getattr(block, "sites", {}):
                depth = depth_heads(block)
                reads_depth = depth is not None and depth.memory == name
                only_writes = depth is not None and reads_depth and not depth.slots  # for later layers
                if name in names and not only_writes:
                    parts.append(Part(f"{name} {layer}", "depth" if reads_depth else "memory", (layer,), name))
        if not parts:
            raise RequestError(
                f"this {self.model.config.model_type} model has no layer and no memory that was added to a base; expected one made "
                "by upscale."
            )
        for name in filter(names.__contains__, self.memories.attached):
            for number, tables in enumerate(self.memories.tables(name)):
                if len(tables.layers) > 1:
                    label = f"{name} bank {number} (layers {', '.join(map(str, tables.layers))})"
                    parts.append(Part(label, "bank", tables.layers, name))
        return parts


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has wrapped a model, which may be of any kind; PEFT need not be installed."""
    return hasattr(model, "peft_config")
