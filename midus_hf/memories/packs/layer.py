"""Attention to packs and the sequence, in one softmax."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.heads import (
    Attention,
    AttentionFunction,
    HeadsOutput,
    SequenceHeads,
    get_attention_host,
    require_log_sum_exp,
)
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.sites import InsideAttention
from midus_hf.memories.hosting.state import without_last
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.reading import OpenPacks, Recording
from midus_hf.memories.packs.service import OpensPacks
from midus_hf.memories.registry import register_layer
from midus_hf.ops.moda.reference import joint_attention, sequence_scores, shares_of_both


class PackedHeads(InsideAttention):
    """Heads of a layer that also read packs. Other memories change their output for the sequence and the packs."""

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.memory = next(entry.name for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        get_attention_host(layer).changes.insert(0, self)

    def attend(
        self, attention_function: AttentionFunction, module: Attention, *heads: Any, **kwargs: object
    ) -> HeadsOutput:
        """Attend to the sequence, and to the packs that tokens of the pass read, if there are any."""
        layer, call = self.layer, self.layer.call
        if not call.memory_inputs.is_complete_for(layer.classes[self.memory], self.memory):
            return attention_function(module, *heads, **kwargs)
        query, key, value, mask = heads
        inputs = layer.inputs_of(self.memory, call.memory_inputs)
        if isinstance(inputs["packs"], Recording):  # also where the layer skips the memory
            inputs["packs"].note(layer.memories[self.memory].index, module, key, value, call.rotation)  # type: ignore[arg-type]
            return attention_function(module, *heads, **kwargs)
        if self.memory not in layer.sites:
            return attention_function(module, *heads, **kwargs)
        implementation = module.config.config._attn_implementation
        sequence = SequenceHeads(module, attention_function, implementation, query, key, value, mask, kwargs)
        return layer.memories[self.memory](sequence=sequence, **inputs)


@register_layer(PacksOptions)
class Packs(MemoryModule):
    """A layer's part of packs: it has no tensors, and reads keys and values of the texts whose names are open.

    A pack ends `distance` positions before the last token of its name. Its scores are raised by `score_bias`, in a chat by
    `chat_score_bias`; at 0, a token reads the same as if the pack's text were there.

    Args:
        options: Options of the memory.
        sizes: Sizes of the model.
    """

    sites = (PackedHeads,)
    services = (OpensPacks,)
    options: PacksOptions
    rollback = staticmethod(without_last)

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation that does not return the log-sum-exp of its softmax."""
        require_log_sum_exp(implementation)

    def forward(self, *, sequence: SequenceHeads, packs: OpenPacks) -> HeadsOutput:
        """Attend to the sequence and to the packs of each token, in one softmax.

        Args:
            sequence: The layer's attention to the sequence.
            packs: Packs that tokens read.

        Returns:
            The output of the heads, `[B, T, H, d]`, that of the sequence alone, bit for bit, where a token reads no pack; and
            attention weights to the sequence, if they are known, which sum to less than 1 where a token reads a pack.
        """
        if packs.is_whole and sequence.query.shape[2] == 1 and sequence.mask is None:  # a step of a generation
            (part,) = packs.parts
            return sequence.attend_with_extra_keys(*packs.of(self.index, part, sequence.module), part.bias)
        output, weights, lse = sequence.with_log_sum()
        alone = output.transpose(1, 2)  # [B, H, T, d]
        pieces, done, shares_of_sequence = [], 0, torch.ones_like(lse)
        # Attention caps scores only in eager mode.
        softcap = sequence.softcap if sequence.implementation != "sdpa" else None
        for part in packs.parts:
            keys, values = packs.of(self.index, part, sequence.module)
            scores = sequence_scores(
                sequence.query[:, :, part.tokens],
                keys,
                part.reads.unsqueeze(1),
                False,
                sequence.scaling,
                softcap,
            )  # [B, H, T', S]
            if part.bias is not None:
                scores = scores + part.bias[:, None]
            is_empty = ~part.reads.any(-1)[:, None]  # [B, 1, T']
            scores = scores.masked_fill(is_empty.unsqueeze(-1), 0)
            shares = scores.softmax(-1).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, K, G * T', S]
            read = shares @ values.to(shares.dtype)  # [B, K, G * T', d]
            read = read.unflatten(2, (-1, scores.shape[2])).flatten(1, 2)  # [B, H, T', d]
            read_lse = scores.logsumexp(-1).masked_fill(is_empty, float("-inf"))
            tokens = part.tokens
            if weights is not None:
                shares_of_sequence[:, :, tokens] = shares_of_both(lse[:, :, tokens], read_lse)[1]
            pieces.append(alone[:, :, done : tokens.start])
            pieces.append(joint_attention(alone[:, :, tokens], lse[:, :, tokens], read, read_lse))
            done = tokens.stop
        if weights is not None:
            weights = weights * shares_of_sequence.unsqueeze(-1).to(weights.dtype)
        joined = torch.cat([*pieces, alone[:, :, done:]], dim=2).transpose(1, 2)
        return torch.where(packs.is_open[:, :, None, None], joined, output), weights
