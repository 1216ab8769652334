"""Heads that also read what earlier layers wrote at their own position (Mixture-of-Depths Attention, section 2)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from midus_config.declared_tensors import Role
from midus_config.memories.depth_attention import DepthAttentionOptions, SlotSource
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.registry import MemoryModule, register_memory
from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.ops.depth_attention import depth_shares
from midus_hf.ops.joining import Depth

Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys and values `[B, K, T, n, d]` of the slots that are kept, from the oldest to the newest, and the utility of each,
`[B, T, n]`."""


@register_memory("depth-attention")
class DepthAttention(MemoryModule):
    """What a layer has for attention over the depth: the weight of it per head, and projections of the slots that it writes.

    Args:
        options: `DepthAttentionOptions`.
        sizes: Of the model.
    """

    acts_through: ClassVar[tuple[Role, ...]] = ("gate",)
    options: DepthAttentionOptions

    def __init__(self, options: DepthAttentionOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.kv_heads = sizes.num_key_value_heads

    def forward(self, read: torch.Tensor, *, slot: SlotSource | None = None, **depth: Any) -> Any:
        """Write a slot, or read those of earlier layers.

        Args:
            read: What there is to read: `[B, T, D]` for a slot, queries `[B, H, T, d]` as slots are rotated otherwise.
            slot: Which slot to write. Default: none.
            depth: What `attend` takes beside queries, if there is none to write.

        Returns:
            A key and a value, `[B, K, T, d]`, in front of norm and rotation; or what `attend` returns.
        """
        return self.attend(read, **depth) if slot is None else self._project(read, slot)

    def _project(self, read: torch.Tensor, source: SlotSource) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (self._projected(read, f"{source}_{part}") for part in ("key", "value"))
        return key, value

    def _projected(self, read: torch.Tensor, name: str) -> torch.Tensor:
        projected = getattr(self, name)(read)
        if self.options.bias:
            projected = projected + getattr(self, f"{name}_bias")
        return projected.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def attend(
        self,
        query: torch.Tensor,
        *,
        sequence: SequenceHeads,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        utilities: torch.Tensor | None = None,
        keeps: bool = False,
        raw_keys: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Kept | None]:
        """What heads read in one softmax over the sequence and the slots.

        Args:
            query: `[B, H, T, d]`, rotated as keys are.
            sequence: What heads read of the sequence.
            keys: n of `[B, K, T, d]`, from the oldest slot to the newest.
            values: n of `[B, K, T, d]`.
            utilities: `[B, T, m]`, those of the m oldest slots, which were read before. Default: all are read for the first time.
            keeps: Whether to choose those that the next layer reads. Default: no.
            raw_keys: n of `[B, K, T, d]`, keys in front of a norm of this layer, which is not that of the next. Default: `keys`.

        Returns:
            `[B, T, H, d]`; attention weights, if the sequence's are known; the slots that are kept, if any are.
        """
        depth = Depth(query, keys, values, sequence.scaling, sequence.softcap, self.weight, self.mixing)
        output, weights = sequence.joined(depth)
        kept = None
        if keeps:
            shares = depth_shares(query, keys, sequence.scaling, sequence.softcap)
            kept = self.kept(keys if raw_keys is None else raw_keys, values, shares, utilities)
        return output, weights, kept

    @property
    def weight(self) -> torch.Tensor | None:
        """g of each head, `[H]`; None where it is 1."""
        return _Bounded.apply(self.depth_weight, None) if self.options.depth_weight == "multiplied" else None

    @property
    def mixing(self) -> torch.Tensor | None:
        """a of each head, `[H]`; None where it is 1."""
        return _Bounded.apply(self.depth_weight, 1.0) if self.options.depth_weight == "mixed" else None

    def kept(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        shares: torch.Tensor,
        utilities: torch.Tensor | None,
    ) -> Kept:
        """The slots that the next layer reads beside those that this one writes.

        A slot's utility is the share of the attention to the depth that it gets, of the mean share, averaged over heads; what it was
        before counts one half.

        Args:
            keys: n of `[B, K, T, d]`, from the oldest slot to the newest.
            values: n of `[B, K, T, d]`.
            shares: `[B, H, T, n]`, of each slot in the attention to the depth.
            utilities: `[B, T, m]`, those of the m oldest slots. Default: all are read for the first time.
        """
        utility = shares.mean(1) * len(keys)  # [B, T, n]
        if utilities is not None:
            known = utilities.shape[-1]
            utility = torch.cat([(utility[..., :known] + utilities) / 2, utility[..., known:]], dim=-1)
        written = len(self.options.sources)
        count = self.options.num_read(self.index + 1) - written
        certain = min(self.options.num_newest - written, count)
        ranked = utility.clone()
        ranked[..., len(keys) - certain :] = float("inf")
        chosen = ranked.topk(count, dim=-1).indices.sort(-1).values  # [B, T, S - w], in the order of time
        where = chosen[:, None, :, :, None].expand(-1, keys[0].shape[1], -1, -1, keys[0].shape[-1])
        kept_keys, kept_values = (torch.stack(list(slots), dim=3).gather(3, where) for slots in (keys, values))
        return kept_keys, kept_values, utility.gather(-1, chosen)


class _Bounded(torch.autograd.Function):
    """A number not below 0, nor above the highest; its gradient is that of the number unless it would lead further out.

    So a weight of 0 learns, and none ends where it cannot come back from.
    """

    @staticmethod
    def forward(ctx: Any, raw: torch.Tensor, highest: float | None) -> torch.Tensor:
        ctx.save_for_backward(raw)
        ctx.highest = highest
        return raw.clamp(min=0, max=highest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (raw,) = ctx.saved_tensors
        (gradient,) = gradients
        outward = (raw <= 0) & (gradient > 0)
        if ctx.highest is not None:
            outward = outward | ((raw >= ctx.highest) & (gradient < 0))
        return gradient.masked_fill(outward, 0), None
