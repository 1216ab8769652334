"""The model's own attention to the sequence, with the log-sum-exp of its softmax, for memories that share one softmax with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import Attention, AttentionFunction, HeadsOutput
from midus_hf.ops.moda.op import sequence_lse
from midus_hf.ops.moda.reference import sequence_weights

# Implementations whose masks tell for each query and key whether the key is read.
_MASKS_TELL = ("eager", "sdpa")
# Implementations whose softmax has a known log-sum-exp: returned, or computed separately.
_TELL = (*_MASKS_TELL, "flex_attention")


def require_log_sum_exp(implementation: str | None) -> None:
    """Refuse an attention implementation with which a memory cannot share the softmax on any device.

    Args:
        implementation: The implementation's name; None lets transformers choose, which chooses supported ones only.

    Raises:
        RequestError: If the implementation gives no log-sum-exp of its softmax: FlashAttention 2 and 3 of transformers, paged
            attention, vLLM's and SGLang's (which also put tokens of several requests into one row), and any registered by a user.
    """
    if implementation is not None and implementation not in _TELL:
        raise RequestError(_refusal(implementation))


def _refusal(implementation: str, where: str = "") -> str:
    remedy = "expected attn_implementation 'sdpa' or 'eager', or 'flex_attention' on a GPU."
    if implementation in ("vllm", "sglang"):
        remedy = "expected midus-hf installed beside vLLM (for packs), a server such as `transformers serve`, or a method without it."
    if implementation.startswith("paged"):  # set by continuous batching; transformers 5.23 leaves 'sdpa' as it is
        remedy = "expected `generate`, or continuous batching with attn_implementation 'sdpa' and transformers 5.23."
    return (
        f"attention {implementation!r}{where} does not tell by what its softmax divides, which a memory that attends needs; "
        f"{remedy}"
    )


@dataclass(frozen=True)
class SequenceHeads:
    """A layer's call of the model's own attention to the sequence, not run yet.

    Args:
        module: The layer's attention module.
        own: The model's attention function.
        implementation: Name of the attention implementation.
        query: `[B, H, T, d]`, rotated.
        key: `[B, K, S, d]`, rotated, from the cache.
        value: `[B, K, S, d]`, from the cache.
        mask: The mask, in the form that `own` takes.
        arguments: Keyword arguments of `own`.
    """

    module: Attention
    own: AttentionFunction
    implementation: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    arguments: Mapping[str, Any]

    @property
    def scaling(self) -> float:
        """Factor that scores are multiplied by."""
        return self.arguments["scaling"]

    @property
    def softcap(self) -> float | None:
        """Limit of the scores, c in `c * tanh(score / c)`; None if scores are not capped."""
        return self.arguments.get("softcap")

    def with_log_sum(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Run the model's own attention, and tell by what its softmax divides.

        Returns:
            The output `[B, T, H, d]`, attention weights to the sequence `[B, H, T, S]` if the implementation returns them, and the
            log-sum-exp of the scores `[B, H, T]`, float32 at least.

        Raises:
            RequestError: If the log-sum-exp of the softmax over the sequence is not known.
        """
        require_log_sum_exp(self.implementation)
        output, extra = self.alone()  # weights, or the log-sum-exp of flex_attention
        if self.implementation in _MASKS_TELL:
            softcap = self.softcap if self.implementation == "eager" else None  # torch's attention does not cap
            arguments = (self.query, self.key, self.mask, self._is_causal, self.scaling, softcap)
            return output, extra, sequence_lse(*arguments)
        if extra is None:
            raise RequestError(self._refusal)
        return output, None, extra.to(torch.promote_types(extra.dtype, torch.float32))

    def alone(self) -> HeadsOutput:
        """Run the model's own attention, and return its output `[B, T, H, d]` and its second result (weights, or None)."""
        return self.own(self.module, self.query, self.key, self.value, self.mask, **self.arguments)

    def beside(self, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> HeadsOutput:
        """Attend with one query per row, which has no mask, to other keys and values too, in one softmax; return as `alone`.

        Args:
            key: `[B, K, S', d]`, rotated.
            value: `[B, K, S', d]`.
            bias: `[B, 1, S']`, number added to their scores; None for 0.
        """
        key, value = torch.cat([key, self.key], 2), torch.cat([value, self.value], 2)
        if bias is None:
            return self.own(self.module, self.query, key, value, None, **self.arguments)
        mask = F.pad(bias.to(self.query.dtype), (0, self.key.shape[2]))[:, None]  # [B, 1, 1, S' + S]
        if self.implementation == "sdpa" and self.query.is_cpu:
            # With a mask, transformers repeats keys and values for each query head, which takes longer than to attend.
            arguments = {"dropout_p": self.arguments.get("dropout", 0.0), "scale": self.scaling}
            has_groups = self.query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(self.query, key, value, mask, **arguments, enable_gqa=has_groups)
            return output.transpose(1, 2), None
        return self.own(self.module, self.query, key, value, mask, **self.arguments)

    def log_sum(self) -> torch.Tensor:
        """Return the log-sum-exp of scores, `[B, H, T]`, float32 at least, for inspection. Dropout is not applied.

        Raises:
            RequestError: If the implementation does not give it.
        """
        if self.implementation in _MASKS_TELL:
            return sequence_lse(self.query, self.key, self.mask, self._is_causal, self.scaling, self.softcap)
        lse = self.alone()[1] if self.implementation == "flex_attention" else None
        if lse is None:
            raise RequestError(self._refusal)
        return lse.to(torch.promote_types(lse.dtype, torch.float32))

    def shares(self, head: int) -> torch.Tensor:
        """Return for inspection the weight of each key for each query of a head, `[B, T, S]`, in the softmax over the sequence alone.

        Args:
            head: Number of the query head.

        Raises:
            RequestError: If the implementation's masks do not tell which keys each query reads.
        """
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
            self.softcap,
        )
        return weights[:, 0]

    @property
    def _is_causal(self) -> bool:
        """True if attention is causal without a mask, by the rules of transformers."""
        if self.implementation != "sdpa" or self.mask is not None or self.query.shape[2] == 1:
            return False
        is_causal = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if is_causal is None else is_causal)

    @property
    def _refusal(self) -> str:
        return _refusal(self.implementation, f" on {self.query.device.type}")
