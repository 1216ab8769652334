"""A family's attention or feed-forward network, with what memories change inside it for one forward pass."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.models.rotation import Rotation, unrotated

Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Given what a projection reads and what it gives, what it shall give instead."""


class HeadReader(NamedTuple):
    """What a memory makes of what heads give.

    Args:
        read: Given queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and what the heads give
            `[B, T, H, d]`, what they shall give instead.
        wants_unrotated: Whether it gets queries without their rotation as well, `[B, H, T, d]`, as `unrotated`; by what scores
            are multiplied, as `scaling`; and what they do not exceed, as `softcap`, if they are capped.
    """

    read: Callable[..., torch.Tensor]
    wants_unrotated: bool


class HeadsOfDepth(Protocol):
    """What a memory over the depth asks of attention, and does in its place."""

    reads: bool
    """Whether it attends in the place of the model's own attention."""
    wants_heads: bool
    """Whether it wants the keys and values of the tokens of the pass."""
    wants_raw_key: bool
    """Whether it wants what the key projection gives."""

    def attend(self, sequence: SequenceHeads) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What heads give, `[B, T, H, d]`, and attention weights if they are known."""

    def note_heads(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take keys, rotated, and values of the tokens of the pass, `[B, K, T, d]`."""

    def note_raw_key(self, key: torch.Tensor) -> None:
        """Take what the key projection gave, `[B, T, K * d]`."""


PROJECTION_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output_projection": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""What the families call the projections of a layer, by their role."""


class _View:
    """A module with some attributes replaced, for the length of one call; the module itself stays as it is."""

    def __init__(self, module: nn.Module, replaced: dict[str, Any]):
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["_replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_module"], name)


class Adapted:
    """Mixin for a family's attention or feed-forward network, whose projections a call may adapt.

    The family's own forward runs on a view of the module in which projections are replaced, so nothing of it is written a
    second time, and nothing of a call is left on the module.
    """

    family_class: ClassVar[type[nn.Module]]
    """The family's class, whose forward runs."""

    def forward(
        self, hidden_states: torch.Tensor, adapters: Mapping[str, Adapter] | None = None, **kwargs: Any
    ) -> Any:
        """As the family's forward.

        Args:
            hidden_states: `[B, T, D]`.
            adapters: What projections give instead, by their role. Default: nothing is changed.
            kwargs: What the family's forward takes besides.
        """
        if not adapters:
            return self.family_class.forward(self, hidden_states, **kwargs)
        return self.family_class.forward(_View(self, self._replaced_projections(adapters)), hidden_states, **kwargs)

    def _replaced_projections(self, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
        return {
            PROJECTION_NAMES[role]: _adapted(getattr(self, PROJECTION_NAMES[role]), adapter)
            for role, adapter in adapters.items()
        }


class HostAttention(Adapted):
    """Mixin for a family's attention in a layer that memories are attached to: a class of its own."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        adapters: Mapping[str, Adapter] | None = None,
        readers: Sequence[HeadReader] = (),
        depth: HeadsOfDepth | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the family's forward.

        Args:
            hidden_states: `[B, T, D]`.
            adapters: What projections give instead, by their role. Default: nothing is changed.
            readers: What heads read beside the sequence, one after another. Default: nothing.
            depth: What heads read of the depth, in one softmax with the sequence, and write for later layers. Default: nothing.
            kwargs: What the family's forward takes besides.
        """
        if not readers and depth is None:
            return super().forward(hidden_states, adapters, **kwargs)
        # The families look their attention function up in the config and hand it every keyword argument they do not know.
        replaced: dict[str, Any] = {
            "config": _View(self.config, {"_attn_implementation": _WITH_MEMORY}),
            "own_config": self.config,
        }
        cache = kwargs.get("past_key_values")
        if depth is not None and depth.wants_raw_key:
            before = dict(adapters or {})
            adapters = {**before, "key": _noting(before.get("key"), depth.note_raw_key)}
        if depth is not None and depth.wants_heads and cache is not None:
            kwargs["past_key_values"] = _View(cache, {"update": _noting_update(cache.update, depth.note_heads)})
        if adapters:
            replaced |= self._replaced_projections(adapters)
        view = _View(self, replaced)
        call = AttentionCall(readers, kwargs.get("position_embeddings"), depth, cache is None)
        return self.family_class.forward(view, hidden_states, memory_call=call, **kwargs)


class AttentionCall(NamedTuple):
    """What memories do in one call of attention.

    Args:
        readers: What heads read beside the sequence.
        rotation: Cosines and sines of the pass.
        depth: What heads read of the depth, if anything.
        keys_are_new: Whether keys are those of the tokens of the pass alone, for there is no cache.
    """

    readers: Sequence[HeadReader]
    rotation: Rotation | None
    depth: HeadsOfDepth | None
    keys_are_new: bool


_WITH_MEMORY = f"with_memory_{__name__.replace('.', '_')}"
"""A name of its own for each copy of this code that a checkpoint brings."""


def _attend_with_memory(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    memory_call: AttentionCall,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function, or one that reads the depth as well, and what memories make of its output."""
    implementation = module.own_config._attn_implementation
    eager = sys.modules[module.family_class.__module__].eager_attention_forward
    own = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    depth = memory_call.depth
    if depth is not None and depth.wants_heads and memory_call.keys_are_new:
        depth.note_heads(key, value)
    if depth is not None and depth.reads:
        output, weights = depth.attend(
            SequenceHeads(module, own, implementation, query, key, value, attention_mask, kwargs)
        )
    else:
        output, weights = own(module, query, key, value, attention_mask, **kwargs)  # [B, T, H, d]
    if memory_call.readers:
        output = _read_by(memory_call, module, (query, key, value), output, kwargs.get("softcap"))
    return output, weights


def _read_by(
    memory_call: AttentionCall,
    module: Any,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    """What the readers of a call make, one after another, of what heads give; `heads` are queries, keys and values."""
    for reader in memory_call.readers:
        extra: dict[str, Any] = {}
        if reader.wants_unrotated:
            rotation = memory_call.rotation
            extra = {"unrotated": unrotated(heads[0], rotation), "scaling": module.scaling, "softcap": softcap}
        output = reader.read(*heads, output, **extra)
    return output


ALL_ATTENTION_FUNCTIONS.register(_WITH_MEMORY, _attend_with_memory)


def _adapted(projection: Callable[[torch.Tensor], torch.Tensor], adapter: Adapter) -> Callable[..., torch.Tensor]:
    def project(inputs: torch.Tensor) -> torch.Tensor:
        return adapter(inputs, projection(inputs))

    return project


def _noting(adapter: Adapter | None, note: Callable[[torch.Tensor], None]) -> Adapter:
    """An adapter that tells what its projection gives."""

    def noting(read: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given = given if adapter is None else adapter(read, given)
        note(given)
        return given

    return noting


def _noting_update(
    update: Callable[..., Any], note: Callable[[torch.Tensor, torch.Tensor], None]
) -> Callable[..., Any]:
    """A cache's `update` that tells which keys and values it is given."""

    def noting(key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        note(key, value)
        return update(key, value, *args, **kwargs)

    return noting
