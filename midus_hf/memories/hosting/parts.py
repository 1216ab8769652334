"""Names of the parts of models and layers, and what a pass gives to memories besides hidden states."""

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from midus_hf.config.errors import RequestError
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import MemoryEntry

# Positional and keyword arguments of a call, and what a layer or its part returns: hidden states, or a tuple that begins with them.
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
PartOutput = torch.Tensor | tuple[Any, ...]

#: Argument of forwards, and field of outputs, that holds the cache: `cache` from Transformers 5.24 on, before `past_key_values`.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def named_cache(cache: object, past_key_values: Cache | None, *, stacklevel: int = 5) -> Keywords:
    """Return the keyword arguments that pass the cache, given under either name, to a family's forward.

    Before Transformers 5.24, continuous batching passes its own kind of cache as `cache` in addition to `past_key_values`.
    """
    if CACHE == "cache" and past_key_values is not None and not torch.compiler.is_compiling():
        ignored = "" if cache is None else ", and ignored beside `cache`"
        message = f"`past_key_values` is deprecated{ignored}, as in Transformers. Use `cache` instead."
        warnings.warn(message, FutureWarning, stacklevel=stacklevel)
    if CACHE == "cache" or cache is None or isinstance(cache, Cache):
        return {CACHE: past_key_values if cache is None else cache}
    return {CACHE: past_key_values, "cache": cache}


#: Names of the children that mix tokens, in any type's layers; a layer's mixer is the first that it has.
MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "temporal_block")

#: Names of the children that are, or route to, the feed-forward network; the first that a layer has.
FEED_FORWARDS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "mlp_block", "ffn")

#: Names of the projections of attention and feed-forward networks, by role; the first that a part has.
PROJECTIONS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output_projection": ("o_proj", "out_proj", "dense", "output_proj", "linear_out", "Wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "gate_up_proj", "input_linear", "Wi"),
    "down": ("down_proj", "w2", "c_proj", "fc2", "output_linear", "dense_4h_to_h", "Wo"),
}

STACKED = ("qkv_proj", "query_key_value")

KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")


def projection_name(part: Any, role: str) -> str:
    """Return the name of the module with a role in attention or a feed-forward network, or ""."""
    return next((name for name in PROJECTIONS[role] if isinstance(getattr(part, name, None), nn.Module)), "")


def has_heads(mixer: Any) -> bool:
    """Return whether a mixer is attention whose output projection reads heads, with known projections."""
    separate = all(projection_name(mixer, role) for role in ("query", "key", "value"))
    stacked = any(isinstance(getattr(mixer, name, None), nn.Linear) for name in STACKED)
    return hasattr(mixer, "config") and bool(projection_name(mixer, "output_projection")) and (separate or stacked)


def stacked_rows(stacked: Any, following: Any, roles: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the rows of each projection that a linear module stacks, by `roles` in order.

    The first has as many rows as the `following` module, the output projection or `down`, has inputs; the others share the rest.
    """
    first, *others = roles
    rest = (stacked.out_features - following.in_features) // len(others)
    return ((first, following.in_features), *((role, rest) for role in others))


class MissingPartError(RequestError):
    """Raised if a layer, described in words, lacks the part for a memory at a site."""

    def __init__(self, layer: str, site: str):
        super().__init__(
            f"{layer} has no part for a memory at the site {site!r}; expected another site, such as 'behind-layer', or a layer that "
            "has the part."
        )


def decoder_of(model: Any) -> Any:
    """Return the module with the decoder `layers` of a model, also of a task head or a composite model."""
    decoder = model.get_decoder()
    # Llama 4's language model has its stack in another attribute than the one it names as its base model.
    return decoder if hasattr(decoder, "layers") else decoder.model


class FamilyMixin(nn.Module):
    """Mixin in front of a family's class, whose modules the class takes over."""

    family_class: ClassVar[type]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.__bases__[-1], FamilyMixin):  # FSDP makes subclasses of classes here
            cls.family_class = cls.__bases__[-1]


class LayerNames(FamilyMixin):
    """Mixin for a family's layers that holds the names of parts. The defaults are Llama's."""

    feed_forward_name: ClassVar[str | None] = "mlp"
    attention_norm: ClassVar[str | None] = "input_layernorm"
    attention_output_norm: ClassVar[str | None] = None
    mlp_output_norm: ClassVar[str | None] = None
    mixer_names: ClassVar[tuple[str, ...]] = ("self_attn",)

    @property
    def mixer_name(self) -> str:
        """Name of the child that mixes tokens; empty if none is known to."""
        return next((name for name in self.mixer_names if getattr(self, name, None) is not None), "")


@dataclasses.dataclass(frozen=True)
class TokenPlaces:
    """Padding and documents in a pass. Default: no padding, one document per row."""

    real: torch.Tensor | None = None  # [B, T], bool, false for padding
    starts: torch.Tensor | None = None  # [B, T], bool, true if a document begins here after another one of the row

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "TokenPlaces":
        """Return the padding and documents on another device."""
        return TokenPlaces(*(_moved(each, device, non_blocking) for each in (self.real, self.starts)))


def token_places(
    token_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    position_ids: torch.Tensor | None,
    num_tokens: int,
    *,
    may_hold_documents: bool,
) -> TokenPlaces:
    """Find padding and documents among the tokens of a pass.

    Args:
        token_mask: `[B, S]`, zero for padding, the last T columns for this pass; or between tokens, `[B, 1, T, T]`, in which padding
            is hidden from itself (`shown_tokens`). None: no padding.
        position_ids: `[B, T]`, or None.
        num_tokens: T.
        may_hold_documents: Whether a position that does not follow the last one begins a document, as without a mask and a cache.
    """
    real = starts = None
    shown = shown_tokens(token_mask)
    if isinstance(token_mask, torch.Tensor) and token_mask.dim() == 2:
        may_hold_documents = False
        real = token_mask[:, token_mask.shape[1] - num_tokens :] != 0
    elif shown is not None and shown.shape[2] == num_tokens:
        real = shown.diagonal(dim1=1, dim2=2)  # [B, T]
    if may_hold_documents and num_tokens > 1 and position_ids is not None and position_ids.dim() == 2:
        starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0))  # the first token begins the row anyway
    if real is not None and starts is not None:
        starts = starts & real & real.roll(1, dims=1)  # the first token after padding begins the row
    if torch.compiler.is_compiling() or num_tokens == 1:
        return TokenPlaces(real, starts)  # a graph cannot branch on what tensors hold; a decoding step need not wait
    holds_documents, is_padded = starts is not None and bool(starts.any()), real is not None and not bool(real.all())
    return TokenPlaces(real if is_padded else None, starts if holds_documents else None)


def shown_tokens(mask: object) -> torch.Tensor | None:
    """Return which tokens each one sees, `[B, T, S]`, by a mask `[B, H, T, S]`; None without one."""
    if isinstance(mask, dict):  # by kinds of layers
        mask = mask.get("full_attention", next(iter(mask.values())))
    if not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
        return None
    return mask[:, 0] > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask[:, 0] != 0


class CarriedKey(NamedTuple):
    """Key of a tensor for later layers; `part` distinguishes several of a memory in one layer."""

    name: str
    layer: int
    part: str = "output"


class MemoryInputs:
    """Inputs of memories in one pass: what each service made, by its key, and arguments that memories take.

    Made per pass, so that two passes may run before one backward pass, and checkpointing repeats a layer with the same inputs.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, arguments: Mapping[str, object] | None = None):
        self._values, self._arguments = values or {}, arguments or {}
        self.carried: dict[CarriedKey, torch.Tensor | None] = {}

    def arguments_for(self, memory_class: type[MemoryModule], name: str, layer: int) -> Keywords:
        """Return a memory's keyword arguments: passed `forward_arguments`, and what its services give.

        The class is the module's, which PEFT may have wrapped since; an inserted memory's name is empty.
        """
        inputs = {key: self._arguments[key] for key in memory_class.forward_arguments if key in self._arguments}
        for service in memory_class.services:
            inputs |= service.layer_arguments(self._values.get(service.key), name, layer)
        return inputs

    def is_complete_for(self, memory_class: type[MemoryModule], name: str) -> bool:
        """Return whether all required services have inputs for a memory."""
        required = (service.key for service in memory_class.services if service.is_required)
        return all(name in self._values.get(key, ()) for key in required)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "MemoryInputs":
        """Return the inputs on another device; accelerate calls this before a layer on another one."""
        moved = copy.copy(self)  # all copies share the tensors that layers carry
        moved._values = _moved(self._values, device, non_blocking)
        moved._arguments = _moved(self._arguments, device, non_blocking)
        return moved


def _moved(value: object, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


def arguments_of_pass(names: set[str], arguments: Keywords, own: Keywords) -> Keywords:
    """Return the arguments `names` of a forward, the family's or our `own`; refuse lone embeddings."""
    values = {name: arguments.get(name, own.get(name)) for name in names}
    if "input_ids" in values and values["input_ids"] is None:
        values["input_ids"] = own["token_ids"]
        if values["input_ids"] is None:
            raise RequestError(
                "inputs_embeds is passed alone, and a memory of this model reads input_ids; expected input_ids. Or pass the ids "
                "with the embeddings, as token_ids."
            )
    return {name: value for name, value in values.items() if value is not None}


def carried_outputs(entry: MemoryEntry, layer: int) -> tuple[CarriedKey, ...]:
    """Return the tensors that a memory in a layer, if it is there, gives to later layers."""
    if layer not in entry.layers:
        return ()
    index = entry.layers.index(layer)
    skips = (CarriedKey(entry.name, layer),) if entry.into and entry.into[index] != layer else ()
    parts = entry.options.layer_outputs(index, len(entry.layers))
    return (*skips, *(CarriedKey(entry.name, layer, part) for part in parts))


def carried_inputs(entry: MemoryEntry, layer: int) -> tuple[CarriedKey, ...]:
    """Return the tensors that a layer takes from a memory in earlier layers."""
    skips = tuple(CarriedKey(entry.name, read) for read in skip_sources(entry, layer) if read != layer)
    if layer not in entry.layers:
        return skips
    taken = entry.options.layer_inputs(entry.layers.index(layer))
    return (*skips, *(CarriedKey(entry.name, entry.layers[index], part) for index, part in taken))


def skip_sources(entry: MemoryEntry, layer: int) -> tuple[int, ...]:
    """Return the layers where a memory reads the input for results that are added after `layer`."""
    return tuple(read for read, into in zip(entry.layers, entry.into, strict=False) if into == layer)
