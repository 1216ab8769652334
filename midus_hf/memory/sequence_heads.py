"""A model's own attention, for a memory that attends in its place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.ops.sequence_lse import sequence_lse, sequence_weights

_MASKS_TELL = ("eager", "sdpa")
"""Implementations whose masks say of each query and key whether it is read."""


@dataclass(frozen=True)
class SequenceHeads:
    """What the heads of a layer would read of the sequence.

    Args:
        module: The layer's attention.
        own: The model's attention function.
        implementation: Its name.
        query: `[B, H, T, d]`, rotated.
        key: `[B, K, S, d]`, rotated, from the cache.
        value: `[B, K, S, d]`.
        mask: As the function takes it.
        arguments: By keyword, as the function takes them.
    """

    module: Any
    own: Callable[..., Any]
    implementation: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    arguments: Mapping[str, Any]

    @property
    def scaling(self) -> float:
        """By what scores are multiplied."""
        return self.arguments["scaling"]

    @property
    def softcap(self) -> float | None:
        """What no score exceeds, if they are capped."""
        return self.arguments.get("softcap")

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What heads read of the sequence.

        Returns:
            `[B, T, H, d]`, as the model's own attention gives it, bit for bit; `[B, H, T]`, the logarithm of the sum of the
            exponentials of scores; and attention weights `[B, H, T, S]`, if that attention gives them.

        Raises:
            ValueError: If nothing tells that logarithm.
        """
        if self.implementation not in (*_MASKS_TELL, "flex_attention"):
            raise ValueError(self._refusal)
        output, told = self.own(self.module, self.query, self.key, self.value, self.mask, **self.arguments)
        if self.implementation == "flex_attention":
            if told is None:
                raise ValueError(self._refusal)
            return output, told.to(torch.promote_types(told.dtype, torch.float32)), None
        return output, self._lse(), told

    def log_sum(self) -> torch.Tensor:
        """The logarithm of the sum of the exponentials of scores, `[B, H, T]`, to look at beside a pass: nothing is drawn at random.

        Raises:
            ValueError: If nothing tells it.
        """
        return self.read()[1] if self.implementation not in _MASKS_TELL else self._lse()

    def shares(self, head: int) -> torch.Tensor:
        """What each query of a head reads of each key, in the softmax over the sequence alone, `[B, T, S]`, to look at.

        Args:
            head: Number of the query head.

        Raises:
            ValueError: If the model's attention does not say what its masks are.
        """
        if self.implementation not in _MASKS_TELL:
            raise ValueError(
                f"attention {self.implementation!r} has masks that do not say what each query reads; expected attn_implementation "
                "'sdpa' or 'eager'."
            )
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        kv_head = head // (heads // kv_heads)
        of_all = self.mask is None or self.mask.shape[1] == 1
        weights = sequence_weights(
            self.query[:, head : head + 1],
            self.key[:, kv_head : kv_head + 1],
            self.mask if of_all else self.mask[:, head : head + 1],
            self._is_causal,
            self.scaling,
            self.softcap,
        )
        return weights[:, 0]

    def _lse(self) -> torch.Tensor:
        """Computed beside the attention itself, by the rules of transformers for its masks."""
        return sequence_lse(self.query, self.key, self.mask, self._is_causal, self.scaling, self.softcap)

    @property
    def _is_causal(self) -> bool:
        if self.implementation != "sdpa" or self.mask is not None or self.query.shape[2] == 1:
            return False
        asked = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if asked is None else asked)

    @property
    def _refusal(self) -> str:
        device = self.query.device.type
        return (
            f"attention {self.implementation!r} on {device} does not tell by what its softmax divides, which a memory that reads the "
            "depth needs; expected attn_implementation 'sdpa' or 'eager', or 'flex_attention' on a GPU."
        )
