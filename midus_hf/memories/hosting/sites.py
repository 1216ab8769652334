"""Sites where memories add to what a layer computes, or change what its parts compute."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memories.hosting.heads import Attention, AttentionFunction, HeadsOutput, get_attention_host, unrotated
from midus_hf.memories.hosting.layer import HostLayer, Site, get_hidden_states, hidden_states_argument, with_first
from midus_hf.memories.hosting.parts import Arguments, CarriedKey, Keywords, PartOutput, skip_sources
from midus_hf.memories.registry import Memories, MemoryEntry


class ChangesProjections(Site):
    """Memories that change the outputs of projections of a part of the layer."""

    def hook_projections(self, part: str) -> None:
        """Let the memories of this site change the outputs of projections of a part, which they name by role."""
        layer = self.layer
        at_site = [layer.classes[name] for name, site in layer.sites.items() if site == self.name]
        for role in dict.fromkeys(role for memory_class in at_site for role in memory_class.projections):
            name, rows = layer.projection(part, role)
            hook: Any = _ProjectionHook(self, rows)
            self.hook(f"{part}.{name}", hook)

    def changed(self, role: str, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the output of a projection with the changes of the memories, made one after another."""
        layer, call = self.layer, self.layer.call
        for name in layer.at(self.name, call.memory_inputs):
            if role in layer.classes[name].projections:
                inputs = layer.inputs_of(name, call.memory_inputs)
                output = layer.memories[name](read, output, projection=role, **inputs)
        return output


class _ProjectionHook(NamedTuple):
    site: ChangesProjections
    rows: tuple[tuple[str, int], ...]

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: torch.Tensor) -> torch.Tensor:
        if len(self.rows) == 1:
            return self.site.changed(self.rows[0][0], args[0], output)
        outputs = output.split([count for _, count in self.rows], dim=-1)
        changed = (self.site.changed(role, args[0], part) for (role, _), part in zip(self.rows, outputs, strict=True))
        return torch.cat(list(changed), dim=-1)


class InsideAttention(Site):
    """Memories that change what the layer's attention computes."""

    name = "inside-attention"

    @staticmethod
    def is_missing(layer: HostLayer) -> bool:
        return layer.attention_class is None or not isinstance(layer.mixer_part, layer.attention_class)


class AttentionAdapters(InsideAttention, ChangesProjections):
    """Memories that change the outputs of projections of attention."""

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.hook_projections(layer.mixer_name)


class AttentionHeads(InsideAttention):
    """Memories that change the output of attention heads, made one after another."""

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        get_attention_host(layer).changes.append(self)

    def attend(
        self, attention_function: AttentionFunction, module: Attention, *heads: Any, **kwargs: object
    ) -> HeadsOutput:
        """Attend by `attention_function`, and let each memory change the output of the heads, `[B, T, H, d]`.

        A memory gets queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and the output; if it
        wants them, also `unrotated` queries, `scaling`, the factor of the scores, and `softcap`, their limit or None.
        """
        output, weights = attention_function(module, *heads, **kwargs)
        query, key, value, _ = heads
        layer, call = self.layer, self.layer.call
        for name in layer.at(self.name, call.memory_inputs):
            if type(self) in layer.classes[name].sites:
                extra = layer.inputs_of(name, call.memory_inputs)
                if layer.classes[name].wants_unrotated:
                    extra["unrotated"] = unrotated(module, query, call.rotation)
                    extra |= {"scaling": kwargs["scaling"], "softcap": kwargs.get("softcap")}
                output = layer.memories[name](query, key, value, output, **extra)
        return output, weights


class BehindAttention(Site):
    """Memories that add to the residual stream after attention."""

    name = "behind-attention"

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        # The last part before the mixer's output is added to the residual stream.
        self.hook(layer.attention_output_norm or layer.mixer_name, self.add)

    @staticmethod
    def is_missing(layer: HostLayer) -> bool:
        return not layer.mixer_name or not layer.adds_mixer

    def add(self, part: nn.Module, args: Arguments, kwargs: Keywords, output: PartOutput) -> PartOutput:
        """Add what memories read from the sum of the part's output and the layer's input."""
        call = self.layer.call
        added = get_hidden_states(output)
        return with_first(
            output, self.layer.with_added(self.name, added, call.layer_input + added, call.memory_inputs)
        )


class InsideFeedForward(ChangesProjections):
    """Memories that change the outputs of projections of the feed-forward network."""

    name = "inside-ffn"

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.hook_projections(str(layer.feed_forward_name))

    @staticmethod
    def is_missing(layer: HostLayer) -> bool:
        return layer.mlp_class is None or not isinstance(layer.feed_forward_part, layer.mlp_class)


class BesideFeedForward(Site):
    """Memories that read the input of the feed-forward network and add to its output, before a norm."""

    name = "beside-ffn"

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.hook(str(layer.feed_forward_name), self.add)

    @staticmethod
    def is_missing(layer: HostLayer) -> bool:
        return layer.feed_forward_part is None

    def add(self, network: nn.Module, args: Arguments, kwargs: Keywords, output: PartOutput) -> PartOutput:
        """Add what memories read from the input of the network."""
        call = self.layer.call
        read = hidden_states_argument(args, kwargs)
        # Some networks of experts return all tokens in one dimension.
        computed = get_hidden_states(output).view_as(read)
        return with_first(output, self.layer.with_added(self.name, computed, read, call.memory_inputs))


class Skip(Site):
    """Memories that read the feed-forward network's input, or whose results are added after the layer."""

    name = "skip"

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self._added = tuple(
            CarriedKey(entry.name, read)
            for entry in memories.attached.values()
            for read in skip_sources(entry, layer.layer_idx)
        )
        if "skip" in layer.sites.values():
            self.hook(str(layer.feed_forward_name), self.read)

    @staticmethod
    def concerns(entry: MemoryEntry, layer: int) -> bool:
        """Return whether the memory reads at the layer, or adds its results after it."""
        return layer in (*entry.layers, *entry.into)

    @staticmethod
    def is_missing(layer: HostLayer) -> bool:
        return "skip" in layer.sites.values() and layer.feed_forward_part is None

    def read(self, network: nn.Module, args: Arguments, kwargs: Keywords, output: PartOutput) -> None:
        """Let memories read the input of the network, for results that are added after a layer."""
        layer, call = self.layer, self.layer.call
        for name in layer.at("skip", call.memory_inputs):
            read = layer.read(name, hidden_states_argument(args, kwargs), call.memory_inputs)
            call.carried[CarriedKey(name, layer.layer_idx)] = read

    def behind(self, output: PartOutput) -> PartOutput:
        call = self.layer.call
        for skip in self._added:
            added = call.carried.get(skip)
            if added is not None:  # None if the memory had nothing to do
                output = with_first(output, get_hidden_states(output) + added.to(call.layer_input.dtype))
        return output


class BehindLayer(Site):
    """Memories that read the layer's output, with what other memories add to it, and add to it."""

    name = "behind-layer"

    def behind(self, output: PartOutput) -> PartOutput:
        stream = get_hidden_states(output)
        return with_first(output, self.layer.with_added(self.name, stream, stream, self.layer.call.memory_inputs))
