"""A family's attention and feed-forward network, with the changes that memories make inside them in one forward pass."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.models.parts import CACHE

# Cosines and sines of a pass, the argument `position_embeddings` of layers.
Rotation = tuple[torch.Tensor, torch.Tensor]

# Function of a projection's input and output that returns the output to use instead.
Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class HeadReader(NamedTuple):
    """A memory's change of the output of attention heads.

    Args:
        read: Function of queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and the output of the
            heads `[B, T, H, d]` that returns the output to use instead.
        wants_unrotated: Whether `read` also takes `unrotated`, the queries without their rotation `[B, H, T, d]`; `scaling`, the
            factor of the scores; and `softcap`, the limit of the scores, None if they are not capped.
    """

    read: Callable[..., torch.Tensor]
    wants_unrotated: bool


class HeadsOfDepth(Protocol):
    """Memory over the depth, with the methods that the layer's attention calls."""

    # Whether the memory replaces the model's own attention.
    reads: bool
    # Whether the memory needs the keys and values of the tokens of the pass.
    wants_heads: bool
    # Whether the memory needs the output of the key projection.
    wants_raw_key: bool

    def attend(self, sequence: SequenceHeads) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of the heads, `[B, T, H, d]`, and attention weights if they are known."""

    def note_heads(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the keys, rotated, and the values of the tokens of the pass, each `[B, K, T, d]`."""

    def note_raw_key(self, key: torch.Tensor) -> None:
        """Take the output of the key projection, `[B, T, K * d]`."""


# Names of a layer's projections in the families' code, by the role of the projection.
PROJECTION_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output_projection": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


class View:
    """A module with some attributes replaced for one call; the module itself is not changed."""

    # A layer of transformers compares its class's forward, and checkpoints its pass if it is the outermost: a view never is.
    forward = None

    def __init__(self, module: nn.Module, replaced: dict[str, Any]):
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["_replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_module"], name)


class Adapted:
    """Mixin for a family's attention or feed-forward network, whose projections a call may adapt.

    The family's own forward runs on a view of the module with other projections, so the forward's code is not repeated here, and
    a call leaves nothing behind on the module.
    """

    # The family's class, whose `forward` is run.
    family_class: ClassVar[type[nn.Module]]

    def forward(
        self, hidden_states: torch.Tensor, *, adapters: Mapping[str, Adapter] | None = None, **kwargs: Any
    ) -> Any:
        """Run the family's forward with adapted projections.

        Args:
            hidden_states: `[B, T, D]`.
            adapters: Adapters of projections, by the role of the projection. Default: no adapters.
            kwargs: Other arguments of the family's forward.
        """
        if not adapters:
            return self.family_class.forward(self, hidden_states, **kwargs)
        return self.family_class.forward(View(self, self._replaced_projections(adapters)), hidden_states, **kwargs)

    def _replaced_projections(self, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
        return {
            PROJECTION_NAMES[role]: _adapted(getattr(self, PROJECTION_NAMES[role]), adapter)
            for role, adapter in adapters.items()
        }


class HostAttention(Adapted):
    """Mixin for a family's attention in a layer with attached memories."""

    # Whether the attention rotates queries and keys.
    rotates: bool = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        readers: Sequence[HeadReader] = (),
        depth: HeadsOfDepth | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward with the changes that memories make.

        Args:
            hidden_states: `[B, T, D]`.
            adapters: Adapters of projections, by the role of the projection. Default: no adapters.
            readers: Changes of the output of the heads, made one after another. Default: no changes.
            depth: Memory through which heads read the depth and write slots for later layers. Default: none.
            kwargs: Other arguments of the family's forward.
        """
        if not readers and depth is None:
            return super().forward(hidden_states, adapters=adapters, **kwargs)
        # A family looks its attention function up in the config, and passes on every keyword argument that it does not know.
        replaced: dict[str, Any] = {
            "config": View(self.config, {"_attn_implementation": _WITH_MEMORY}),
            "own_config": self.config,
        }
        cache = kwargs.get(CACHE)
        if depth is not None and depth.wants_raw_key:
            before = dict(adapters or {})
            adapters = {**before, "key": _noting(before.get("key"), depth.note_raw_key)}
        if depth is not None and depth.wants_heads and cache is not None:
            kwargs[CACHE] = View(cache, {"update": _noting_update(cache.update, depth.note_heads)})
        if adapters:
            replaced |= self._replaced_projections(adapters)
        view = View(self, replaced)
        call = AttentionCall(readers, kwargs.get("position_embeddings"), depth, cache is None)
        return self.family_class.forward(view, hidden_states, memory_call=call, **kwargs)


class AttentionCall(NamedTuple):
    """Changes that memories make in one call of attention.

    Args:
        readers: Changes of the output of the heads, made one after another.
        rotation: Cosines and sines of the pass.
        depth: Memory over the depth, or None.
        keys_are_new: Whether all keys belong to tokens of the pass, since there is no cache.
    """

    readers: Sequence[HeadReader]
    rotation: Rotation | None
    depth: HeadsOfDepth | None
    keys_are_new: bool


# Name of the attention function, different for each copy of this code that a checkpoint brings.
_WITH_MEMORY = f"with_memory_{__name__.replace('.', '_')}"


def _attend_with_memory(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    memory_call: AttentionCall | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model's own attention, joined with the depth if a memory reads the depth, and let readers change the output."""
    if memory_call is None:
        raise _HeadsAttend
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
        output = _read_by(memory_call, module, (query, key, value), output, kwargs["scaling"], kwargs.get("softcap"))
    return output, weights


def _read_by(
    memory_call: AttentionCall,
    module: Any,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the output of the heads after the changes of all readers, in turn; `heads` are queries, keys and values."""
    for reader in memory_call.readers:
        extra: dict[str, Any] = {}
        if reader.wants_unrotated:
            query = unrotated(module, heads[0], memory_call.rotation)
            extra = {"unrotated": query, "scaling": scaling, "softcap": softcap}
        output = reader.read(*heads, output, **extra)
    return output


ALL_ATTENTION_FUNCTIONS.register(_WITH_MEMORY, _attend_with_memory)


class _HeadsAttend(Exception):
    """A call of attention has come to its heads."""


@torch.no_grad()
def rotates(attention: Any, family_class: type[nn.Module]) -> bool:
    """Return whether an attention rotates its queries and keys, which in some families only some layers do.

    Args:
        attention: Attention whose query projection is a linear layer.
        family_class: The family's class of the attention, whose forward is run.
    """
    hidden_states = attention.q_proj.weight.new_zeros(1, 1, attention.q_proj.in_features)
    view = View(attention, {"config": View(attention.config, {"_attn_implementation": _WITH_MEMORY})})
    forward: Any = family_class.forward
    try:  # with a rotation that cannot be used
        forward(view, hidden_states, position_embeddings=(None, None), attention_mask=None, memory_call=None)
    except _HeadsAttend:
        return False
    except (AttributeError, TypeError):
        return True
    raise AssertionError("attention calls its attention function")


def rotated(attention: Any, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate queries or keys `[B, H, T, d]` as a family's attention does, if it does and there is a rotation."""
    if rotation is None or not attention.rotates:
        return heads
    rotate: Any = sys.modules[attention.family_class.__module__].apply_rotary_pos_emb
    if rotate.__code__.co_varnames[1] == "cos":  # the function takes queries or keys (Gemma 4)
        return rotate(heads, *rotation)
    return rotate(heads, heads[:, :0], *rotation)[0]  # the function takes queries and keys


def unrotated(attention: Any, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Undo the rotation of queries or keys `[B, H, T, d]`, and their lengthening by scaled rotary embeddings.

    Raises:
        ValueError: If the family rotates by complex numbers, as Llama 4 does.
    """
    if rotation is None or not attention.rotates:
        return heads
    if not isinstance(rotation, tuple):
        raise ValueError(
            f"{attention.family_class.__name__} rotates queries and keys by complex numbers; expected cosines and sines. Choose a "
            "memory that does not read rotated heads."
        )
    cos, sin = (part.to(torch.promote_types(heads.dtype, torch.float32)) for part in rotation)
    squared = cos.square() + sin.square()
    return rotated(attention, heads.to(cos.dtype), (cos / squared, -sin / squared)).to(heads.dtype)


def _adapted(projection: Callable[[torch.Tensor], torch.Tensor], adapter: Adapter) -> Callable[..., torch.Tensor]:
    def project(inputs: torch.Tensor) -> torch.Tensor:
        return adapter(inputs, projection(inputs))

    return project


def _noting(adapter: Adapter | None, note: Callable[[torch.Tensor], None]) -> Adapter:
    """Return an adapter that passes the projection's output, as changed by `adapter`, to `note`."""

    def noting(read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        output = output if adapter is None else adapter(read, output)
        note(output)
        return output

    return noting


def _noting_update(
    update: Callable[..., Any], note: Callable[[torch.Tensor, torch.Tensor], None]
) -> Callable[..., Any]:
    """Return a cache's `update` that also passes its keys and values to `note`."""

    def noting(key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        note(key, value)
        return update(key, value, *args, **kwargs)

    return noting
