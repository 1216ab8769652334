"""State what memories should compute, by changes of a base, with which proofs compare a model that hosts the memories.

A statement uses nothing of the code that hosts memories. As the base runs, the calls of its modules are noted in one table, and the
changed output of a module is a function of the output and of what the table holds. Parts and projections are known by name, and
heads are seen by the statement's own attention function.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.memories.hierarchical.bank import FetchedBatch, FetchedLayer
from midus_hf.memories.hosting.layer import get_hidden_states, with_first
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.registry import MemoryEntry
from scripts.anatomy.architecture import (
    LayerParts,
    Projection,
    architecture_of,
    feed_forward_of,
    mixer_of,
    projection_of,
)
from scripts.anatomy.reading import read_type

#: Types of memory whose statement adds in another order, so that sums may be rounded otherwise.
SUMS_IN_ANOTHER_ORDER = ("hier-kv", "moda")


class Heads(NamedTuple):
    """Queries `[B, H, T, d]`, keys and values `[B, K, T, d]`, output `[B, T, H, d]`, weights and arguments of an attention call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    weights: torch.Tensor
    arguments: Mapping[str, Any]

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scores of queries `[..., T, d]` and keys `[..., S, d]`, scaled and capped as the attention function was called."""
        scores = query @ key.transpose(-1, -2) * self.arguments["scaling"]
        cap = self.arguments.get("softcap")
        return scores if cap is None else cap * torch.tanh(scores / cap)


@dataclass
class _Call:
    """The arguments of a module's call, and the heads of an attention, once they are computed."""

    args: Any
    kwargs: Any
    heads: Heads | None = None

    @property
    def read(self) -> torch.Tensor:
        """The hidden states that the module reads."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]


# The latest call of each module of a base.
_Calls = dict[nn.Module, _Call]


def state(
    base: Any,
    hosting: Any,
    entry: MemoryEntry,
    fetched: FetchedBatch | None = None,
    inputs: Mapping[nn.Module, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Change a base for good, so that the base computes what a model with the memory should compute.

    Args:
        base: Model without memory.
        hosting: A model with the memory, whose parameters are read.
        entry: The memory's entry in the config.
        fetched: Blocks of the rows, for a memory that fetches blocks. Default: none.
        inputs: Other keyword arguments of the memories in a pass of the hosting model. Default: none.
    """
    calls: _Calls = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] = _Call(args, kwargs)

    for module in base.modules():
        module.register_forward_pre_hook(note, with_kwargs=True)
    if entry.options.attends:
        base.set_attn_implementation("eager")  # which returns its weights
    names = architecture_of(base.config.model_type).layers
    for position, index in enumerate(entry.layers):
        layer = base.model.layers[index]
        host = hosting.model.layers[index]
        if entry.site == "inserted":
            layer.register_forward_pre_hook(partial(_run_block, host.memory, names[type(layer)]), with_kwargs=True)
            continue
        memory = host.memories[entry.name]
        arguments = {**inputs.get(memory, {}), **({"fetched": fetched.blocks_for(index)} if fetched else {})}
        if entry.options.type == "hier-kv":
            _change_heads(mixer_of(layer), calls, partial(_with_blocks, fetched.blocks_for(index)))
        elif entry.options.attends:
            writers = [
                _Writer(
                    hosting.model.layers[earlier].memories[entry.name],
                    mixer_of(base.model.layers[earlier]),
                    feed_forward_of(base.model.layers[earlier]),
                )
                for earlier in entry.layers[:position]
            ]
            if writers:
                gate = memory.depth_gate.clamp(0, 1)
                _change_heads(mixer_of(layer), calls, partial(_with_depth, writers, gate, calls))
        elif entry.site.startswith("inside-"):
            part = mixer_of(layer) if entry.site == "inside-attention" else feed_forward_of(layer)
            for role in entry.options.layer_projections(hosting.config.memories().sizes):
                projection = _projection(part, role, base.config)
                module = getattr(part, projection.module)
                adapt = partial(memory, **{**arguments, "projection": role})
                _change(module, partial(_adapted, adapt, projection.rows, calls, module))
        else:
            into = base.model.layers[entry.into[position]] if entry.into else layer
            norm = names[type(layer)].attention_output_norm
            _state_beside(entry.site, layer, into, norm, partial(memory, **arguments), calls)


def _change(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the hidden states in the output of a module."""
    module.register_forward_hook(lambda _, args, output: with_first(output, change(get_hidden_states(output))))


def _state_beside(
    site: str,
    layer: nn.Module,
    into: nn.Module,
    norm: str | None,
    read: Callable[[torch.Tensor], torch.Tensor],
    calls: _Calls,
) -> None:
    """Add what a memory reads at a site; results of a skip go to the layer `into`, and `norm` is the mixer's output norm."""
    network = feed_forward_of(layer)
    mixer = mixer_of(layer)
    changed, added = {
        "beside-ffn": (network, lambda output: read(calls[network].read).view_as(output)),
        "skip": (into, lambda output: read(calls[network].read)),
        "behind-attention": (getattr(layer, norm) if norm else mixer, lambda output: read(calls[layer].read + output)),
        "behind-layer": (layer, read),
    }[site]
    _change(changed, lambda output: output + added(output))


def _projection(part: Any, role: str, config: Any) -> Projection:
    """Return the projection of a part in a role, which the part of a proven wiring has."""
    found = projection_of(part, role, read_type(config.model_type).stacked)
    assert found is not None, "a proof chooses layers that have the projections"
    return found


def _adapted(
    adapt: Callable[..., torch.Tensor], rows: slice, calls: _Calls, module: nn.Module, output: torch.Tensor
) -> torch.Tensor:
    return _with_rows(output, rows, adapt(calls[module].read, output[..., rows]))


def _with_rows(output: torch.Tensor, rows: slice, changed: torch.Tensor) -> torch.Tensor:
    """Return the output of a module with other values in some rows."""
    output = output.clone()
    output[..., rows] = changed
    return output


def _run_block(memory: nn.Module, names: LayerParts, layer: Any, args: Any, kwargs: Any) -> Any:
    """Run the memory of a block in front of a layer, on heads of the layer's own attention."""
    hidden_states, *others = args
    normalised = getattr(layer, names.attention_norm)(hidden_states) if names.attention_norm else hidden_states
    heads = get_hidden_states(
        _twin(mixer_of(layer), output_projection=_Unprojected())(hidden_states=normalised, **kwargs)
    )
    return (memory(heads, hidden_states), *others), kwargs


def _twin(attention: Any, **projections: nn.Module) -> Any:
    """Return a module with the parameters of an attention, and with other projections in some roles."""
    twin = copy.copy(attention)
    twin._modules = dict(attention._modules)
    for role, other in projections.items():
        name, rows = _projection(attention, role, attention.config)
        twin._modules[name] = other if rows == slice(None) else _WithRows(twin._modules[name], rows, other)
    return twin


class _Unprojected(nn.Module):
    """A projection that returns its input. Some families' projections take the index of the layer as well."""

    def forward(self, read: torch.Tensor, *_: object) -> torch.Tensor:
        return read


class _WithRows(nn.Module):
    """A module that stacks projections, with another projection in some rows."""

    def __init__(self, module: nn.Module, rows: slice, other: nn.Module):
        super().__init__()
        self.module = module
        self.rows = rows
        self.other = other

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        return _with_rows(self.module(read), self.rows, self.other(read))


def _show_heads(attention: Any, use: Callable[[Heads], torch.Tensor]) -> None:
    """Let an attention return what `use` makes of its heads in place of their output."""
    if attention.config._attn_implementation != _STATED:
        attention.implementation = attention.config._attn_implementation
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = _STATED
    attention.use_heads = use


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **arguments: Any) -> Any:
    """Run the attention function of the base, and return what the module uses in place of its output."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.implementation, eager)
    output, weights = attend(module, query, key, value, attention_mask, **arguments)
    return module.use_heads(Heads(query, key, value, output, weights, arguments)).contiguous(), weights


# Name of the attention function by which heads are seen.
_STATED = "stated_by_a_proof"

ALL_ATTENTION_FUNCTIONS.register(_STATED, _attend)


def _change_heads(attention: Any, calls: _Calls, change: Callable[[Any, _Call, Heads], torch.Tensor]) -> None:
    """Change the output of an attention's heads, by a function of the attention, its call and its heads."""

    def use(heads: Heads) -> torch.Tensor:
        call = calls[attention]
        if call.heads is not None:
            raise ValueError("attention calls its attention function more than once; expected one output of the heads")
        call.heads = heads
        return change(attention, call, heads)

    _show_heads(attention, use)


def _unrotated(attention: Any, call: _Call, **projections: nn.Module) -> Heads:
    """Return the heads of an attention for the arguments of a call, without rotation, and with other projections in some roles."""
    twin = _twin(attention, **projections)
    shown = []

    def use(heads: Heads) -> torch.Tensor:
        shown.append(heads)
        return heads.output

    _show_heads(twin, use)
    changed: dict[str, Any] = {CACHE: None}
    if call.kwargs.get("position_embeddings") is not None:
        cos, sin = call.kwargs["position_embeddings"]
        changed["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
    type(attention).forward(twin, *call.args, **{**call.kwargs, **changed})
    return shown[0]


def _with_blocks(blocks: FetchedLayer, attention: Any, call: _Call, heads: Heads) -> torch.Tensor:
    """Return the output of heads and of attention to keys and values of blocks, which have no positions."""
    added = []
    for row, query in enumerate(_unrotated(attention, call).query):  # [H, T, d]
        keys, values = (
            torch.cat([level.tensors[name][row] for level in blocks]).transpose(0, 1)  # [K, R, d]
            for name in ("memory_keys", "memory_values")
        )
        keys, values = (part.repeat_interleave(len(query) // len(part), dim=0) for part in (keys, values))
        added.append((heads.scores(query, keys).softmax(-1) @ values).transpose(0, 1))
    return heads.output + torch.stack(added)


class _Writer(NamedTuple):
    """A layer that writes to the depth: its memory, its attention and its feed-forward network."""

    memory: Any
    attention: Any
    network: nn.Module


class _Fixed(nn.Module):
    """A projection that returns the same output for any input."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.output


def _with_depth(
    writers: list[_Writer], gate: torch.Tensor, calls: _Calls, attention: Any, call: _Call, heads: Heads
) -> torch.Tensor:
    """Return the output of heads joined with attention to slots of earlier layers, by the shares of one softmax over both."""
    query = _unrotated(attention, call).query
    slots = []
    # A slot is what the writer's attention makes, unrotated, of the network's input.
    for memory, writer, network in writers:
        read = calls[network].read
        slots.append(_unrotated(writer, call, key=_Fixed(memory.ffn_key(read)), value=_Fixed(memory.ffn_value(read))))
    group = query.shape[1] // slots[0].key.shape[1]
    # [B, H, T, n, d]
    keys, values = (
        torch.stack([getattr(slot, part) for slot in slots], dim=3).repeat_interleave(group, dim=1)
        for part in ("key", "value")
    )
    depth_scores = heads.scores(query.unsqueeze(3), keys).squeeze(3)  # [B, H, T, n]
    depth_output = (depth_scores.softmax(-1).unsqueeze(3) @ values).squeeze(3).transpose(1, 2)  # [B, T, H, d]
    own_keys = heads.key.repeat_interleave(query.shape[1] // heads.key.shape[1], dim=1)
    own_scores = heads.scores(heads.query, own_keys).diagonal(dim1=-2, dim2=-1)
    sequence_sum = own_scores - heads.weights.diagonal(dim1=-2, dim2=-1).log()  # log-sum-exp of scores, [B, H, T]
    share = (depth_scores.logsumexp(-1) - sequence_sum).sigmoid().transpose(1, 2).unsqueeze(-1)  # [B, T, H, 1]
    opened = gate[:, None] * share
    return (1 - opened) * heads.output + (1 - gate[:, None] + opened) * depth_output
