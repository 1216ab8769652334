"""A model's own attention to the sequence, joined with attention to the depth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from midus_hf.ops.depth.joining import Depth, joined_attention
from midus_hf.ops.depth.reference import joint_attention
from midus_hf.ops.depth.sequence_kernels import Call
from midus_hf.ops.depth.sequence_lse import sequence_lse, sequence_weights

_MASKS_TELL = ("eager", "sdpa")
"""Implementations whose masks say of each query and key whether it is read."""
_TELL = (*_MASKS_TELL, "flex_attention")
"""Implementations of which it is known, or computed beside them, by what their softmax divides."""


def refuse_untold(implementation: str | None) -> None:
    """Refuse an implementation of attention that a model whose heads read the depth cannot run, whatever device it comes to lie on.

    Args:
        implementation: Its name; None leaves the choice to transformers, which has such implementations alone.

    Raises:
        ValueError: If it never tells by what its softmax divides: FlashAttention 2 and 3 of transformers, paged attention, that of
            vLLM, which lays the tokens of several requests in one row besides, and any that somebody registered.
    """
    if implementation is not None and implementation not in _TELL:
        raise ValueError(_refusal(implementation))


def _refusal(implementation: str, place: str = "") -> str:
    remedy = "expected attn_implementation 'sdpa' or 'eager', or 'flex_attention' on a GPU."
    if implementation == "vllm":
        remedy = "expected a server that runs Transformers' own attention, such as `transformers serve`, or a method without it."
    return (
        f"attention {implementation!r}{place} does not tell by what its softmax divides, which a memory that reads the depth needs; "
        f"{remedy}"
    )


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

    def joined(self, depth: Depth) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Join what heads read of the sequence with what they read of the depth (`joint_attention`).

        Args:
            depth: Slots of the same positions.

        Returns:
            `[B, T, H, d]`; where c is 0, what the model's own attention gives, plus what is read of the depth if that is added, bit
            for bit. And attention weights to the sequence alone, `[B, H, T, S]`, if that attention gives them.

        Raises:
            ValueError: If nothing tells by what the softmax over the sequence divides.
        """
        if self.implementation == "sdpa":
            with _InPlaceOfSdpa(depth):
                return self._own()
        refuse_untold(self.implementation)
        output, told = self._own()
        if self.implementation == "eager":
            lse = sequence_lse(self.query, self.key, self.mask, False, self.scaling, self.softcap)
        elif told is None:
            raise ValueError(self._refusal)
        else:
            lse, told = told.to(torch.promote_types(told.dtype, torch.float32)), None
        return joint_attention(output.transpose(1, 2), lse, *depth.read(), depth.added).transpose(1, 2), told

    def _own(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.own(self.module, self.query, self.key, self.value, self.mask, **self.arguments)

    def alone(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What heads read of the sequence, `[B, T, H, d]`, as the model's own attention gives it, and its weights if it gives any."""
        return self._own()

    def log_sum(self) -> torch.Tensor:
        """The logarithm of the sum of the exponentials of scores, `[B, H, T]`, to look at beside a pass: nothing is drawn at random.

        Raises:
            ValueError: If nothing tells it.
        """
        if self.implementation in _MASKS_TELL:
            return sequence_lse(self.query, self.key, self.mask, self._is_causal, self.scaling, self.softcap)
        told = self._own()[1] if self.implementation == "flex_attention" else None
        if told is None:
            raise ValueError(self._refusal)
        return told.to(torch.promote_types(told.dtype, torch.float32))

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

    @property
    def _is_causal(self) -> bool:
        """By the rules of transformers for its masks."""
        if self.implementation != "sdpa" or self.mask is not None or self.query.shape[2] == 1:
            return False
        asked = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if asked is None else asked)

    @property
    def _refusal(self) -> str:
        return _refusal(self.implementation, f" on {self.query.device.type}")


class _InPlaceOfSdpa(TorchFunctionMode):
    """While it is entered, attention of torch is joined with what heads read of the depth.

    So whatever transformers does in front of that call and behind it, for each of its versions, stays what it is.
    """

    def __init__(self, depth: Depth):
        super().__init__()
        self._depth = depth

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return joined_attention(Call(*args, **(kwargs or {})), self._depth)
        return function(*args, **(kwargs or {}))
