"""What memories need of a family's attention to read its heads: its attention function, and the rotation of its heads."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.layer import HostLayer

# Cosines and sines of a pass, the argument `position_embeddings` of layers.
Rotation = tuple[torch.Tensor, torch.Tensor]
# Output of the heads, `[B, T, H, d]`, and attention weights if they are known; and the function that makes them.
HeadsOutput = tuple[torch.Tensor, torch.Tensor | None]
AttentionFunction = Callable[..., HeadsOutput]


class Attention(Protocol):
    """A family's attention that hosts memories at its heads."""

    config: "AttentionHost"


class ChangesHeads(Protocol):
    """Site whose memories change the output of the heads."""

    def attend(self, own: AttentionFunction, module: Attention, *heads: Any, **kwargs: object) -> HeadsOutput:
        """Attend by `own`, the model's attention function with the changes of sites before, and change the output of the heads.

        Args:
            heads: Queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and the mask.
        """


class AttentionHost:
    """Stands for the config of an attention whose heads memories read.

    A family looks its attention function up in the config of the module. Here it finds one that runs the function that the model's
    config names, with the changes of memories around it. Anything else is read from the model's config.

    Args:
        attention: The attention, which gets this in place of its config.
        rotates: Whether the attention rotates queries and keys, which in some families only some layers do.
    """

    def __init__(self, attention: Any, rotates: bool):
        self.config: PreTrainedConfig = attention.config
        self.rotates = rotates
        # Name of the module of the family's code.
        self.modeling = type(attention).__module__
        # Sites whose memories change the heads, in their order.
        self.changes: list[ChangesHeads] = []

    @property
    def _attn_implementation(self) -> str:
        return WITH_MEMORY

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.config, name)


def host_of_heads(layer: HostLayer) -> AttentionHost:
    """Return what hosts memories at the heads of a host layer's attention, which gets it if it has none."""
    attention = layer.mixer_part
    if not isinstance(attention.config, AttentionHost):
        attention.config = AttentionHost(attention, not layer.some_do_not_rotate or rotates(attention))
    return attention.config


# Name of the attention function, different for each copy of this code that a checkpoint brings.
WITH_MEMORY = f"with_memory_{__name__.replace('.', '_')}"


def _attend_with_memory(
    module: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> HeadsOutput:
    """Run the model's own attention with the changes of memories, each around those before."""
    host = module.config
    eager = sys.modules[host.modeling].eager_attention_forward
    attend: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(host.config._attn_implementation, eager)
    for change in host.changes:
        attend = partial(change.attend, attend)
    return attend(module, query, key, value, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(WITH_MEMORY, _attend_with_memory)


class _HeadsAttend(Exception):
    """A call of attention has come to its heads."""

    @classmethod
    def attend(cls, *heads: object, **kwargs: object) -> HeadsOutput:
        """Raise this in place of attending."""
        raise cls


@torch.no_grad()
def rotates(attention: Any) -> bool:
    """Return whether an attention rotates its queries and keys, which in some families only some layers do.

    Args:
        attention: Attention with a config, which has parameters.
    """
    hidden_states = next(attention.parameters()).new_zeros(1, 1, attention.config.hidden_size)
    own, attention.config = attention.config, AttentionHost(attention, rotates=False)
    attention.config.changes.append(_HeadsAttend)
    try:  # with a rotation that cannot be used
        attention.forward(hidden_states, position_embeddings=(None, None), attention_mask=None)
    except _HeadsAttend:
        return False
    except (AttributeError, TypeError):
        return True
    finally:
        attention.config = own
    raise AssertionError("attention calls its attention function")


def rotated(attention: Attention, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate queries or keys `[B, H, T, d]` as a family's attention does, if it does and there is a rotation."""
    host = attention.config
    if rotation is None or not host.rotates:
        return heads
    rotate = sys.modules[host.modeling].apply_rotary_pos_emb
    if rotate.__code__.co_varnames[1] == "cos":  # the function takes queries or keys (Gemma 4)
        return rotate(heads, *rotation)
    return rotate(heads, heads[:, :0], *rotation)[0]  # the function takes queries and keys


def unrotated(attention: Attention, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Undo the rotation of queries or keys `[B, H, T, d]`, and their lengthening by scaled rotary embeddings.

    Raises:
        RequestError: If the family rotates by complex numbers, as Llama 4 does.
    """
    if rotation is None or not attention.config.rotates:
        return heads
    if not isinstance(rotation, tuple):
        raise RequestError(
            f"{type(attention).__name__} rotates queries and keys by complex numbers; expected cosines and sines. Choose a "
            "memory that does not read rotated heads."
        )
    cos, sin = (part.to(torch.promote_types(heads.dtype, torch.float32)) for part in rotation)
    squared = cos.square() + sin.square()
    return rotated(attention, heads.to(cos.dtype), (cos / squared, -sin / squared)).to(heads.dtype)


def moved_by(attention: Attention, heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate keys `[B, K, T, d]` further by angles `[B, T, r]`, in radians."""
    rotation = angles.cos(), angles.sin()
    return rotated(attention, heads.to(angles.dtype), rotation).to(heads.dtype)
