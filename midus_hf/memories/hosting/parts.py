"""Names of a model's and of a layer's parts in the families' code."""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from midus_hf.config.errors import RequestError

# Arguments of a call by place and by name, and what a layer or its part returns: hidden states, or a tuple that begins with them.
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
PartOutput = torch.Tensor | tuple[Any, ...]

#: Name of the argument of forwards, and of the field of outputs, that holds the cache: `cache` from Transformers 5.24 on,
#: `past_key_values` before. Forwards of this package take both names.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def named_cache(cache: object, past_key_values: Cache | None) -> Keywords:
    """Return the keyword arguments by which a family's forward gets its cache, which came under either name.

    From Transformers 5.24 on the older name is deprecated, and this warns of it as the family does. Before, continuous batching
    passes its own kind of cache as `cache`, beside `past_key_values`.
    """
    if CACHE == "cache" and past_key_values is not None and not torch.compiler.is_compiling():
        ignored = "" if cache is None else ", and ignored beside `cache`"
        message = f"`past_key_values` is deprecated{ignored}, as in Transformers. Use `cache` instead."
        warnings.warn(message, FutureWarning, stacklevel=5)
    if CACHE == "cache" or cache is None or isinstance(cache, Cache):
        return {CACHE: past_key_values if cache is None else cache}
    return {CACHE: past_key_values, "cache": cache}


#: Names of the children that mix tokens, in any type's layers. The first name that a layer has is its mixer.
MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "temporal_block")

#: Names of the children that are, or route to, the feed-forward network. The first name that a layer has is taken.
FEED_FORWARDS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "mlp_block", "ffn")

#: Names of the projections of attention and of feed-forward networks, by role. The first name that a part has is taken.
PROJECTIONS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output_projection": ("o_proj", "out_proj", "dense", "output_proj", "linear_out", "Wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "gate_up_proj", "input_linear", "Wi"),
    "down": ("down_proj", "w2", "c_proj", "fc2", "output_linear", "dense_4h_to_h", "Wo"),
}

#: Names of linear modules that stack the rows of the query, key and value projections.
STACKED = ("qkv_proj", "query_key_value")

#: Names of the norms of keys.
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")


def projection_name(part: Any, role: str) -> str:
    """Return the name of the module of an attention or a feed-forward network that has a role; empty if no module has it."""
    return next((name for name in PROJECTIONS[role] if isinstance(getattr(part, name, None), nn.Module)), "")


def has_heads(mixer: Any) -> bool:
    """Return whether a mixer is an attention with an output projection, whose input is the output of the heads.

    The projections of queries, keys and values are separate, or stacked in one linear module.
    """
    separate = all(projection_name(mixer, role) for role in ("query", "key", "value"))
    stacked = any(isinstance(getattr(mixer, name, None), nn.Linear) for name in STACKED)
    return hasattr(mixer, "config") and bool(projection_name(mixer, "output_projection")) and (separate or stacked)


def stacked_rows(stacked: Any, following: Any, roles: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the number of rows of each projection that a linear module stacks, by role, in order.

    Args:
        stacked: The module.
        following: The module whose input is as wide as the first projection's output: the output projection, or `down`.
        roles: Roles of the projections. All but the first have equal numbers of rows.
    """
    first, *others = roles
    rest = (stacked.out_features - following.in_features) // len(others)
    return ((first, following.in_features), *((role, rest) for role in others))


class MissingPart(RequestError):
    """A layer without the part at which a memory is to be.

    Args:
        layer: The layer, in words.
        site: The memory's site.
    """

    def __init__(self, layer: str, site: str):
        super().__init__(
            f"{layer} has no part for a memory at the site {site!r}; expected another site, such as 'behind-layer', or a layer that "
            "has the part."
        )


def decoder_of(model: Any) -> Any:
    """Return the decoder of a language model: the module whose `layers` are the decoder layers, also within a composite model.

    Args:
        model: A causal language model, a model with another head, or a composite model that holds a language model.
    """
    decoder = model.get_decoder()
    # Llama 4's language model names another attribute than that of its stack as its base model.
    return decoder if hasattr(decoder, "layers") else decoder.model


class FamilyMixin(nn.Module):
    """Mixin in front of a family's class, whose modules the class takes over."""

    family_class: ClassVar[type]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.__bases__[-1], FamilyMixin):  # as classes are that FSDP makes of classes here
            cls.family_class = cls.__bases__[-1]


class LayerNames(FamilyMixin):
    """Mixin for a family's layers that holds the names of parts, and how to take a layer over. The defaults are Llama's names."""

    # Name of the feed-forward network, dense or of experts; None if the layers have none.
    feed_forward_name: ClassVar[str | None] = "mlp"
    # Name of the norm before attention; None if the family has none.
    attention_norm: ClassVar[str | None] = "input_layernorm"
    # Name of the norm behind the attention's output projection.
    attention_output_norm: ClassVar[str | None] = None
    # Name of the norm behind the feed-forward network.
    mlp_output_norm: ClassVar[str | None] = None
    # Names of the children that mix tokens; a layer has one of them.
    mixer_names: ClassVar[tuple[str, ...]] = ("self_attn",)

    @property
    def mixer_name(self) -> str:
        """Name of the child that mixes tokens; empty if no child is known to."""
        return next((name for name in self.mixer_names if getattr(self, name, None) is not None), "")
