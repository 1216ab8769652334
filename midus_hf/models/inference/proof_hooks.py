"""What memories should compute, stated by hooks on a base, with which proofs compare a model that hosts a memory.

The hooks use nothing of the code that hosts a memory. Projections are hooked by name, and heads are seen by an attention function of
their own.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.config.memory_checks import layer_projections
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.memory.fetched import FetchedBatch, FetchedLayer
from midus_hf.models.inference.architecture import PROJECTIONS, feed_forward_of, mixer_of
from midus_hf.models.layer import first_of, with_first
from midus_hf.models.parts import CACHE

_Read = Callable[[torch.Tensor], torch.Tensor]


def _beside_network(layer: Any, into: Any, host: Any, read: _Read) -> list[Any]:
    def add(network: nn.Module, args: Any, output: Any) -> Any:
        return with_first(output, first_of(output) + read(args[0]).view_as(first_of(output)))

    return [getattr(layer, host.feed_forward_name).register_forward_hook(add)]


def _behind_another_layer(layer: Any, into: Any, host: Any, read: _Read) -> list[Any]:
    network_inputs: list[torch.Tensor] = []

    def add(_: nn.Module, args: Any, output: Any) -> Any:
        return with_first(output, first_of(output) + read(network_inputs.pop()))

    network = getattr(layer, host.feed_forward_name)
    return [
        network.register_forward_pre_hook(lambda _, args: network_inputs.append(args[0])),
        into.register_forward_hook(add),
    ]


def _behind_layer(layer: Any, into: Any, host: Any, read: _Read) -> list[Any]:
    def add(_: nn.Module, args: Any, output: Any) -> Any:
        return with_first(output, first_of(output) + read(first_of(output)))

    return [layer.register_forward_hook(add)]


def _behind_mixer(layer: Any, into: Any, host: Any, read: _Read) -> list[Any]:
    entered: list[torch.Tensor] = []

    def add(_: nn.Module, args: Any, output: Any) -> Any:
        added = first_of(output)
        return with_first(output, added + read(entered.pop() + added))

    last = getattr(layer, host.attention_output_norm or host.mixer_name)
    return [layer.register_forward_pre_hook(lambda _, args: entered.append(args[0])), last.register_forward_hook(add)]


def block_before(block: Any) -> Callable[..., Any]:
    """Return a pre-hook of a layer that runs a block's memory in front of the layer, on heads of the layer's own attention."""

    def run(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden_states, *others = args
        norm = getattr(layer, block.attention_norm) if block.attention_norm else nn.Identity()
        attention, heads = getattr(layer, block.mixer_name), []
        handle = attention.o_proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
        attention(hidden_states=norm(hidden_states), **kwargs)
        handle.remove()
        return (block.memory(heads[0], hidden_states), *others), kwargs

    return run


#: Hooks of a layer, or of the layer into which results go, by the site of a memory that is read from hidden states.
HOOKS: dict[str, Callable[[Any, Any, Any, _Read], list[Any]]] = {
    "beside-ffn": _beside_network,
    "skip": _behind_another_layer,
    "behind-layer": _behind_layer,
    "behind-attention": _behind_mixer,
}


class Heads(NamedTuple):
    """Queries `[B, H, T, d]`, keys and values `[B, K, T, d]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


# Function of an attention module, its heads, their output `[B, T, H, d]`, attention weights and the arguments of the attention
# function that returns the output to use instead.
Change = Callable[[Any, Heads, torch.Tensor, Any, Any], torch.Tensor]


def adapted_projections(base: Any, hosting: Any, entry: MemoryEntry, fetched: FetchedBatch) -> list[Any]:
    """Hook the projections of a base so that a memory changes their outputs; return the handles of the hooks.

    Args:
        base: Model to hook, without memory.
        hosting: The model with the memory.
        entry: The memory's entry in the config.
        fetched: Blocks of the rows.
    """
    handles = []
    for index in entry.layers:
        memory = hosting.model.layers[index].memories[entry.name]
        layer = base.model.layers[index]
        part = getattr(layer, (mixer_of(layer) if entry.site == "inside-attention" else feed_forward_of(layer)) or "")
        for role in layer_projections(entry.options, hosting.config.memories().sizes):
            add = _adding(memory, role, fetched.of(index))
            handles.append(getattr(part, PROJECTIONS[role]).register_forward_hook(add))
    return handles


def attention_to_blocks(base: Any, hosting: Any, entry: MemoryEntry, fetched: FetchedBatch) -> list[Any]:
    """Hook the attention of a base so that heads add what they read from keys and values of blocks; return the handles of the hooks.

    Args:
        base: Model to hook, without memory.
        hosting: The model with the memory.
        entry: The memory's entry in the config.
        fetched: Blocks of the rows.
    """
    handles: list[Any] = []
    for index in entry.layers:
        layer = base.model.layers[index]
        handles += _changed_attention(getattr(layer, mixer_of(layer) or ""), _reading_blocks(fetched.of(index)))
    return handles


def attention_to_depth(base: Any, hosting: Any, entry: MemoryEntry, fetched: FetchedBatch | None) -> list[Any]:
    """Hook the attention of a base so that heads add what they read from earlier layers; return the handles of the hooks.

    Keys and values of slots are the keys and values of the writer's own attention, unrotated, with the memory's projections of the
    feed-forward network's input.

    Args:
        base: The base, whose attention is eager, so that its weights are known.
        hosting: The model with the memory.
        entry: The memory's entry in the config.
        fetched: Not used, since no blocks are fetched.
    """
    handles: list[Any] = []
    written: dict[int, torch.Tensor] = {}  # inputs of feed-forward networks, by layer
    for position, index in enumerate(entry.layers):
        layer = base.model.layers[index]
        network, attention = (getattr(layer, name(layer) or "") for name in (feed_forward_of, mixer_of))
        handles.append(network.register_forward_pre_hook(_noting(written, index)))
        writers = [
            (earlier, hosting.model.layers[earlier].memories[entry.name], getattr(of, mixer_of(of) or ""))
            for earlier, of in ((number, base.model.layers[number]) for number in entry.layers[:position])
        ]
        if writers:
            gate = hosting.model.layers[index].memories[entry.name].depth_gate.clamp(0, 1)
            handles += _changed_attention(attention, _reading_depth(written, writers, gate))
    return handles


def _adding(memory: nn.Module, role: str, blocks: FetchedLayer) -> Callable[..., torch.Tensor]:
    def add(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return memory(args[0], output, projection=role, fetched=blocks)

    return add


def _noting(inputs: dict[int, torch.Tensor], index: int) -> Callable[..., None]:
    def note(_: nn.Module, args: Any) -> None:
        inputs[index] = args[0]

    return note


def _reading_blocks(blocks: FetchedLayer) -> Change:
    """Return a change that adds attention to keys and values of blocks, which have no positions, to the output of heads."""

    def change(call: "_Call", heads: Heads, output: torch.Tensor, weights: Any, arguments: Any) -> torch.Tensor:
        query, added = call.unrotated().query, []
        for row, row_query in enumerate(query):  # [H, T, d]
            keys, values = (
                torch.cat([level.tensors[name][row] for level in blocks.levels]).transpose(0, 1)  # [K, R, d]
                for name in ("memory_keys", "memory_values")
            )
            keys, values = (part.repeat_interleave(len(row_query) // len(part), dim=0) for part in (keys, values))
            scores = _scores(row_query, keys, arguments)
            added.append((scores.softmax(-1) @ values).transpose(0, 1))
        return output + torch.stack(added)

    return change


def _reading_depth(
    written: dict[int, torch.Tensor], writers: list[tuple[int, Any, nn.Module]], gate: torch.Tensor
) -> Change:
    """Return a change that joins the output of heads with attention to slots, by the shares of one softmax over both."""

    def change(call: "_Call", heads: Heads, output: torch.Tensor, weights: Any, arguments: Any) -> torch.Tensor:
        query = call.unrotated().query
        slots = [_slot(call, attention, memory, written[index]) for index, memory, attention in writers]
        groups = query.shape[1] // slots[0].key.shape[1]
        keys, values = (
            torch.stack([getattr(slot, part) for slot in slots], dim=3).repeat_interleave(groups, dim=1)
            for part in ("key", "value")
        )  # [B, H, T, n, d]
        depth_scores = _scores(query.unsqueeze(3), keys, arguments).squeeze(3)  # [B, H, T, n]
        read = (depth_scores.softmax(-1).unsqueeze(3) @ values).squeeze(3).transpose(1, 2)  # [B, T, H, d]
        own_key = heads.key.repeat_interleave(query.shape[1] // heads.key.shape[1], dim=1)
        own_scores = _scores(heads.query, own_key, arguments).diagonal(dim1=-2, dim2=-1)
        sequence_sum = own_scores - weights.diagonal(dim1=-2, dim2=-1).log()  # log-sum-exp of scores, [B, H, T]
        share = (depth_scores.logsumexp(-1) - sequence_sum).sigmoid().transpose(1, 2).unsqueeze(-1)  # [B, T, H, 1]
        opened = gate[:, None] * share
        return (1 - opened) * output + (1 - gate[:, None] + opened) * read

    return change


def _slot(call: "_Call", attention: nn.Module, memory: Any, read: torch.Tensor) -> Heads:
    """Return the heads of an attention whose keys and values are projected from `read` by a memory."""
    handles = [
        getattr(attention, PROJECTIONS[role]).register_forward_hook(_instead(getattr(memory, f"ffn_{role}"), read))
        for role in ("key", "value")
    ]
    try:
        return call.unrotated(attention)
    finally:
        for handle in handles:
            handle.remove()


def _instead(projection: nn.Module, read: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *_: projection(read)


def _scores(query: torch.Tensor, key: torch.Tensor, arguments: Any) -> torch.Tensor:
    """Return scores of queries `[..., T, d]` and keys `[..., S, d]`, scaled and capped as an attention function is called."""
    scores = query @ key.transpose(-1, -2) * arguments["scaling"]
    cap = arguments.get("softcap")
    return scores if cap is None else cap * torch.tanh(scores / cap)


class _Call:
    """A call of an attention module whose heads are seen."""

    def __init__(self, attention: Any, args: Any, kwargs: Any):
        self._attention, self._args, self._kwargs = attention, args, kwargs

    def unrotated(self, attention: Any = None) -> Heads:
        """Return the heads of the call without rotation, or the heads of a call of another attention with the same arguments."""
        attention = self._attention if attention is None else attention
        rotation = self._kwargs.get("position_embeddings")
        changed: dict[str, Any] = {CACHE: None, "observe": _stop}
        if rotation is not None:
            cos, sin = rotation
            changed["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
        try:
            type(attention).forward(attention, *self._args, **{**self._kwargs, **changed})
        except _Seen as seen:
            return seen.heads
        raise AssertionError("attention did not call its attention function")


class _Seen(Exception):
    """The heads of a call, which ends before the heads are used."""

    def __init__(self, heads: Heads):
        super().__init__("heads are seen")
        self.heads = heads


def _stop(module: Any, heads: Heads, *_: Any) -> Any:
    raise _Seen(heads)


def _changed_attention(attention: Any, change: Change) -> list[Any]:
    """Hook an attention module so that a change is made to the output of its heads; return the handles of the hooks."""
    config = attention.config
    own = config._attn_implementation

    def observe(module: nn.Module, args: Any, kwargs: Any) -> Any:
        call, runs = _Call(module, args, kwargs), []

        def run(called: Any, heads: Heads, mask: Any, arguments: Any) -> tuple[torch.Tensor, Any]:
            runs.append(called)
            if len(runs) > 1:
                raise ValueError(
                    "attention calls its attention function more than once; expected one output of the heads"
                )
            eager = sys.modules[type(module).__module__].eager_attention_forward
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
            output, weights = attend(called, *heads, mask, **arguments)
            return change(call, heads, output, weights, arguments).contiguous(), weights

        config._attn_implementation = _OBSERVED
        return args, {**kwargs, "observe": run}

    def restore(*_: Any) -> None:
        config._attn_implementation = own

    return [
        attention.register_forward_pre_hook(observe, with_kwargs=True),
        attention.register_forward_hook(restore, always_call=True),
    ]


def _observed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    observe: Callable[..., Any],
    **arguments: Any,
) -> Any:
    return observe(module, Heads(query, key, value), attention_mask, arguments)


# Name of the attention function by which heads are seen.
_OBSERVED = "observed_by_a_proof"

ALL_ATTENTION_FUNCTIONS.register(_OBSERVED, _observed)

#: Hooks of a base for memories inside attention, by type; those of other memories inside a part are `adapted_projections`.
HOOKS_INSIDE = {"hier-kv": attention_to_blocks, "depth-attention": attention_to_depth}
