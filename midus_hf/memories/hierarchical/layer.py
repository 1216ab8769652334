"""Memories that compute with fetched parameters: hidden units, factors, keys and values (section 2.2)."""

from typing import ClassVar

import torch
from transformers.activations import ACT2FN

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import FetchedLayer
from midus_hf.memories.hierarchical.fetching import BlockService
from midus_hf.memories.hierarchical.options import (
    HierarchicalOptions,
    HierFFNOptions,
    HierKVOptions,
    HierLoraFFNOptions,
    HierLoraOptions,
    HierLoraQKOptions,
    HierLoraVOOptions,
)
from midus_hf.memories.hosting.sites import AttentionAdapters, AttentionHeads, BesideFeedForward, InsideFeedForward
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import register_layer
from midus_hf.ops.block_linear import block_linear


class FetchingMemory(MemoryModule):
    """A memory without parameters in the model; it computes with the blocks that the texts fetched."""

    services = (BlockService,)
    options: HierarchicalOptions


@register_layer(HierFFNOptions)
class HierFFN(FetchingMemory):
    """Hidden units with the model's activation that are added to a gated feed-forward network (figure 18)."""

    sites = (BesideFeedForward,)

    def __init__(self, options: HierarchicalOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.activation = ACT2FN[sizes.activation]

    def forward(self, hidden_states: torch.Tensor, *, fetched: FetchedLayer) -> torch.Tensor:
        """Return the added units' output, `W_down (act(W_gate x) * W_up x)`, `[B, T, D]`, summed over levels.

        Blocks are `gate`, `up` `[U, r, D]` and `down` `[U, D, r]`.
        """
        added = None
        for level in fetched:
            gate, up, down = (level.tensors[name] for name in ("gate", "up", "down"))
            units = self.activation(block_linear(hidden_states, gate, level.blocks))
            units = units * block_linear(hidden_states, up, level.blocks)  # [B, T, r]
            level_output = block_linear(units, down, level.blocks)
            added = level_output if added is None else added + level_output
        assert added is not None, "a memory has at least one level"
        return added


class HierLora(FetchingMemory):
    """Low-rank factors that are added to projections (figures 14 to 16)."""

    options: HierLoraOptions

    def forward(
        self, read: torch.Tensor, output: torch.Tensor, *, projection: str, fetched: FetchedLayer
    ) -> torch.Tensor:
        """Return a projection's output with the factors added, `W x + alpha * sum_l B_l A_l x`, `[B, T, o]`.

        For x `[B, T, i]` and W x, blocks of the projection's role are `{role}_down` `[U, r, i]`, A, and `{role}_up` `[U, o, r]`, B.
        """
        for level in fetched:
            narrow = block_linear(read, level.tensors[f"{projection}_down"], level.blocks)
            wide = block_linear(narrow, level.tensors[f"{projection}_up"], level.blocks)
            output = output + self.options.alpha * wide.to(output.dtype)
        return output


@register_layer(HierLoraQKOptions)
class HierLoraQK(HierLora):
    """Low-rank factors of the query and key projections."""

    sites = (AttentionAdapters,)
    projections: ClassVar[tuple[str, ...]] = HierLoraQKOptions.roles


@register_layer(HierLoraVOOptions)
class HierLoraVO(HierLora):
    """Low-rank factors of the value and output projections."""

    sites = (AttentionAdapters,)
    projections: ClassVar[tuple[str, ...]] = HierLoraVOOptions.roles


@register_layer(HierLoraFFNOptions)
class HierLoraFFN(HierLora):
    """Low-rank factors of the projections of the feed-forward network."""

    sites = (InsideFeedForward,)
    projections: ClassVar[tuple[str, ...]] = HierLoraFFNOptions.roles


@register_layer(HierKVOptions)
class HierKV(FetchingMemory):
    """Keys and values that every token attends to in addition to the sequence (figure 17)."""

    sites = (AttentionHeads,)
    wants_unrotated: ClassVar[bool] = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        *,
        unrotated: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
        fetched: FetchedLayer,
    ) -> torch.Tensor:
        """Return the heads' output plus their attention, without a mask, to fetched keys and values.

        Args:
            query: Rotated queries; like `key` and `value`, not used.
            output: `[B, T, H, d]`, the output of the heads.
            unrotated: `[B, H, T, d]`, queries without their rotation.
            scaling: Factor that the model multiplies scores by.
            softcap: Limit of the model's scores, c in `c * tanh(score / c)` (Gemma 2). Default: scores are not capped.
            fetched: Blocks that the rows fetched: `memory_keys`, `memory_values` `[U, r, K, d]`.
        """
        batch, heads, tokens, width = unrotated.shape
        kv_heads = fetched[0].tensors["memory_keys"].shape[2]
        grouped = unrotated.view(batch, kv_heads, heads // kv_heads, tokens, width)
        keys, values = (_rows_of(fetched, name, unrotated.dtype) for name in ("memory_keys", "memory_values"))
        wide = torch.promote_types(unrotated.dtype, torch.float32)
        scores = torch.einsum("bkgtd,brkd->bkgtr", grouped, keys).to(wide) * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        shares = scores.softmax(-1).to(values.dtype)
        read = torch.einsum("bkgtr,brkd->btkgd", shares, values).flatten(2, 3)
        return output + read.to(output.dtype)


def _rows_of(fetched: FetchedLayer, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the blocks of each row, `[B, R, K, d]`, those of all levels side by side."""
    rows = []
    for level in fetched:
        tensor = level.tensors[name]
        of_rows = tensor.expand(len(level.blocks), *tensor.shape[1:]) if len(tensor) == 1 else tensor[level.blocks]
        rows.append(of_rows.to(dtype))
    return torch.cat(rows, dim=1)
