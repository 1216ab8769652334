"""What memories need of attention: its function, its rotation and the log-sum-exp of its softmax."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.options import package_only
from midus_hf.ops.moda.op import sequence_lse, sequence_weights

Rotation = tuple[torch.Tensor, torch.Tensor]
# Output of the heads, `[B, T, H, d]`, and attention weights if they are known; and the function that makes them.
HeadsOutput = tuple[torch.Tensor, torch.Tensor | None]
AttentionFunction = Callable[..., HeadsOutput]


# A family's attention that hosts memories at its heads: its `config` is an `AttentionHost`.
Attention = Any


class AttentionHost:
    """Stands for the config of an attention whose heads memories read.

    A family looks its attention function up in the config of the module; the one here runs the function that the model's config
    names, with the changes of memories around it. Anything else is read from the model's config.

    Args:
        attention: The attention, which gets this in place of its config.
        rotates: Whether the attention rotates queries and keys, as only some layers of some families do.
    """

    def __init__(self, attention: Any, rotates: bool):
        self.config: PreTrainedConfig = attention.config
        self.rotates = rotates
        self.modeling = type(attention).__module__
        # Sites whose memories change the heads, in their order: each has a method `attend`, as `AttentionHeads` has.
        self.changes: list[Any] = []

    @property
    def _attn_implementation(self) -> str:
        return WITH_MEMORY

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.config, name)


def get_attention_host(layer: HostLayer) -> AttentionHost:
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


class _StopAtHeads(Exception):
    """Raised in place of attending."""

    @classmethod
    def attend(cls, *heads: object, **kwargs: object) -> HeadsOutput:
        raise cls


@torch.no_grad()
def rotates(attention: Any) -> bool:
    """Return whether an attention, which has a config and parameters, rotates its queries and keys."""
    hidden_states = next(attention.parameters()).new_zeros(1, 1, attention.config.hidden_size)
    config, attention.config = attention.config, AttentionHost(attention, rotates=False)
    attention.config.changes.append(_StopAtHeads)
    try:  # with a rotation that cannot be used
        attention.forward(hidden_states, position_embeddings=(None, None), attention_mask=None)
    except _StopAtHeads:
        return False
    except (AttributeError, TypeError):
        return True
    finally:
        attention.config = config
    raise AssertionError("attention calls its attention function")


def rotated(attention: Attention, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate queries or keys `[B, H, T, d]` as a family's attention does, if it rotates."""
    host = attention.config
    if rotation is None or not host.rotates:
        return heads
    rotate = sys.modules[host.modeling].apply_rotary_pos_emb
    if rotate.__code__.co_varnames[1] == "cos":  # the function takes queries or keys (Gemma 4)
        return rotate(heads, *rotation)
    return rotate(heads, heads[:, :0], *rotation)[0]  # the function takes queries and keys


def unrotated(attention: Attention, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Undo the rotation and scaling of queries or keys `[B, H, T, d]`; refuse rotation by complex numbers."""
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


# Implementations whose masks tell for each query and key whether the key is read.
_MASKS_TELL = ("eager", "sdpa")
# Implementations whose softmax has a known log-sum-exp: returned, or computed separately.
_LSE_IMPLEMENTATIONS = (*_MASKS_TELL, "flex_attention")


def require_log_sum_exp(implementation: str | None) -> None:
    """Refuse an attention implementation without a log-sum-exp of its softmax on any device.

    With None, transformers chooses a supported one.
    """
    if implementation is not None and implementation not in _LSE_IMPLEMENTATIONS:
        raise _lse_error(implementation)


def _lse_error(implementation: str, where: str = "") -> RequestError:
    remedy = "expected attn_implementation 'sdpa' or 'eager', or 'flex_attention' on a GPU."
    if implementation in ("vllm", "sglang"):
        remedy = "expected midus-hf installed beside vLLM (for packs), a server such as `transformers serve`, or a method without it."
    if implementation.startswith("paged"):  # set by continuous batching; transformers 5.23 leaves 'sdpa' as it is
        remedy = "expected `generate`, or continuous batching with attn_implementation 'sdpa' and transformers 5.23."
    return RequestError(
        f"attention {implementation!r}{where} exposes no log-sum-exp, which this memory needs; {remedy}"
    )


@dataclass(frozen=True)
class SequenceHeads:
    """A layer's call of the model's own attention to the sequence, not run yet."""

    module: Attention
    attention_function: AttentionFunction
    implementation: str
    query: torch.Tensor  # [B, H, T, d], rotated
    key: torch.Tensor  # [B, K, S, d], rotated, from the cache
    value: torch.Tensor  # [B, K, S, d], from the cache
    mask: Any  # in the form that the function takes
    arguments: Mapping[str, Any]  # others of the function, by keyword

    @property
    def scaling(self) -> float:
        """Factor that scores are multiplied by."""
        return self.arguments["scaling"]

    @property
    def softcap(self) -> float | None:
        """Limit of the scores, c in `c * tanh(score / c)`, that the family's attention is given; None for no limit."""
        return self.arguments.get("softcap")

    @property
    def applied_softcap(self) -> float | None:
        """Limit that the scores of the sequence have; torch's own attention has none."""
        return None if self.implementation == "sdpa" else self.softcap

    def with_log_sum(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Attend, and compute the log-sum-exp of the scores, or refuse an implementation without it.

        Return the output `[B, T, H, d]`, attention weights `[B, H, T, S]` if known, and the log-sum-exp `[B, H, T]`, float32 at
        least.
        """
        require_log_sum_exp(self.implementation)
        output, extra = self.attend_to_sequence()  # weights, or the log-sum-exp of flex_attention
        if self.implementation in _MASKS_TELL:
            arguments = (self.query, self.key, self.mask, self._is_causal, self.scaling, self.applied_softcap)
            return output, extra, sequence_lse(*arguments)
        return output, None, self._returned_lse(extra)

    def attend_to_sequence(self) -> HeadsOutput:
        """Return the output `[B, T, H, d]` and the second result of the model's own attention."""
        return self.attention_function(self.module, self.query, self.key, self.value, self.mask, **self.arguments)

    def attend_with_extra_keys(self, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> HeadsOutput:
        """Attend with one query per row, without a mask, to extra keys and values too, in one softmax.

        `key`, rotated, and `value` are `[B, K, S', d]`; `bias` `[B, 1, S']` is added to their scores, None for 0.
        """
        key, value = torch.cat([key, self.key], 2), torch.cat([value, self.value], 2)
        if bias is None:
            return self.attention_function(self.module, self.query, key, value, None, **self.arguments)
        mask = F.pad(bias.to(self.query.dtype), (0, self.key.shape[2]))[:, None]  # [B, 1, 1, S' + S]
        if self.implementation == "sdpa" and self.query.is_cpu:
            # With a mask, transformers repeats keys and values for each query head, which takes longer than to attend.
            arguments = {"dropout_p": self.arguments.get("dropout", 0.0), "scale": self.scaling}
            has_groups = self.query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(self.query, key, value, mask, **arguments, enable_gqa=has_groups)
            return output.transpose(1, 2), None
        return self.attention_function(self.module, self.query, key, value, mask, **self.arguments)

    @package_only
    def log_sum(self) -> torch.Tensor:
        """Return the log-sum-exp of scores without dropout, `[B, H, T]`, float32 at least, for inspection."""
        if self.implementation in _MASKS_TELL:
            return sequence_lse(self.query, self.key, self.mask, self._is_causal, self.scaling, self.applied_softcap)
        return self._returned_lse(self.attend_to_sequence()[1] if self.implementation == "flex_attention" else None)

    @package_only
    def shares(self, head: int) -> torch.Tensor:
        """Return a head's softmax weights over the sequence, `[B, T, S]`, for inspection, or refuse."""
        if self.implementation not in _MASKS_TELL:
            raise RequestError(
                f"attention {self.implementation!r} has masks that do not say what each query reads; expected attn_implementation "
                "'sdpa' or 'eager'."
            )
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        kv_head = head // (heads // kv_heads)
        has_one_mask = self.mask is None or self.mask.shape[1] == 1
        weights = sequence_weights(
            self.query[:, head : head + 1],
            self.key[:, kv_head : kv_head + 1],
            self.mask if has_one_mask else self.mask[:, head : head + 1],
            self._is_causal,
            self.scaling,
            self.applied_softcap,
        )
        return weights[:, 0]

    @property
    def _is_causal(self) -> bool:
        """True if attention is causal without a mask, by the rules of transformers."""
        if self.implementation != "sdpa" or self.mask is not None or self.query.shape[2] == 1:
            return False
        is_causal = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if is_causal is None else is_causal)

    def _returned_lse(self, lse: torch.Tensor | None) -> torch.Tensor:
        if lse is None:
            raise _lse_error(self.implementation, f" on {self.query.device.type}")
        return lse.to(torch.promote_types(lse.dtype, torch.float32))
