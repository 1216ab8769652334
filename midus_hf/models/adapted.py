"""A family's attention and feed-forward network, with the changes that memories make inside them in one forward pass."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.memory.needs import mixin_for
from midus_hf.models.parts import TakesOver

# Cosines and sines of a pass, the argument `position_embeddings` of layers.
Rotation = tuple[torch.Tensor, torch.Tensor]

# Function of a projection's input and output that returns the output to use instead.
Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
        self._module, self.replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_module"], name)


class Adapted(TakesOver):
    """Mixin for a family's attention or feed-forward network, whose projections a call may adapt.

    The family's own forward runs on a view of the module with other projections, so the forward's code is not repeated here, and
    a call leaves nothing behind on the module.
    """

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


class HeadChange:
    """Change by memories of the heads of a layer's attention in one pass."""

    def begin(self, attention: Any, adapters: Mapping[str, Adapter], kwargs: dict[str, Any]) -> Mapping[str, Adapter]:
        """Return the adapters of projections for the call of attention, whose other arguments this may change.

        Args:
            attention: The layer's attention.
            adapters: Adapters of projections, by the role of the projection.
            kwargs: Other arguments of the family's forward.
        """
        return adapters

    def attend(self, own: Callable[..., Any], module: Any, *heads: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Return the output of the heads, `[B, T, H, d]`, and attention weights if they are known.

        Args:
            own: The attention function, with the changes of memories before.
            module: The layer's attention.
            heads: Queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and the mask.
            kwargs: Other arguments of the attention function.
        """
        raise NotImplementedError


class HeadReaders(HeadChange):
    """Changes of the output of the heads, made one after another.

    Args:
        readers: Functions of queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and the output of
            the heads `[B, T, H, d]` that return the output to use instead; and whether the function also takes `unrotated`, the
            queries without their rotation `[B, H, T, d]`; `scaling`, the factor of the scores; and `softcap`, the limit of the
            scores, None if they are not capped.
    """

    def __init__(self, readers: Sequence[tuple[Callable[..., torch.Tensor], bool]]):
        self._readers = readers
        self._rotation: Rotation | None = None

    def begin(self, attention: Any, adapters: Mapping[str, Adapter], kwargs: dict[str, Any]) -> Mapping[str, Adapter]:
        """Take the rotation of the pass."""
        self._rotation = kwargs.get("position_embeddings")
        return adapters

    def attend(self, own: Callable[..., Any], module: Any, *heads: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the model's attention, and let each reader change the output of the heads."""
        output, weights = own(module, *heads, **kwargs)  # [B, T, H, d]
        query, key, value, _ = heads
        for read, wants_unrotated in self._readers:
            extra: dict[str, Any] = {}
            if wants_unrotated:
                extra["unrotated"] = unrotated(module, query, self._rotation)
                extra |= {"scaling": kwargs["scaling"], "softcap": kwargs.get("softcap")}
            output = read(query, key, value, output, **extra)
        return output, weights


@mixin_for("attention-heads", "depth")
class ChangesHeads:
    """Mixin for a family's attention whose heads memories may change."""

    # Whether the attention rotates queries and keys.
    rotates: bool = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        readers: HeadChange | None = None,
        depth: HeadChange | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward with the changes that memories make.

        Args:
            hidden_states: `[B, T, D]`.
            adapters: Adapters of projections, by the role of the projection. Default: no adapters.
            readers: Changes of the output of the heads. Default: no changes.
            depth: Memory through which heads read the depth and write slots for later layers. Default: none.
            kwargs: Other arguments of the family's forward.
        """
        changes = tuple(change for change in (depth, readers) if change is not None)
        if not changes:
            return super().forward(hidden_states, adapters=adapters, **kwargs)
        # A family looks its attention function up in the config, and passes on every keyword argument that it does not know.
        replaced: dict[str, Any] = {
            "config": View(self.config, {"_attn_implementation": _WITH_MEMORY}),
            "own_config": self.config,
        }
        changed: Mapping[str, Adapter] = adapters or {}
        for change in changes:
            changed = change.begin(self, changed, kwargs)
        view = View(self, replaced | self._replaced_projections(changed))
        return self.family_class.forward(view, hidden_states, memory_call=changes, **kwargs)


class HostAttention(ChangesHeads, Adapted):
    """Mixin for a family's attention in a layer with attached memories."""


def note_rotation(layer: Any) -> None:
    """Note at the attention of a host layer whether it rotates its heads, if some layers of the type do not."""
    if layer.some_do_not_rotate:
        layer.mixer_part.rotates = rotates(layer.mixer_part, layer.mixer_part.family_class)


# Name of the attention function, different for each copy of this code that a checkpoint brings.
_WITH_MEMORY = f"with_memory_{__name__.replace('.', '_')}"


def _attend_with_memory(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    memory_call: Sequence[HeadChange] | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model's own attention with the changes of memories, each around those before."""
    if memory_call is None:
        raise _HeadsAttend
    eager = sys.modules[module.family_class.__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.own_config._attn_implementation, eager)
    for change in memory_call:
        attend = partial(change.attend, attend)
    return attend(module, query, key, value, attention_mask, **kwargs)


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
