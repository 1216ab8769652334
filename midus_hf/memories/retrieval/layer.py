"""Base class of memories that retrieve slots: queries, their norm, and random directions instead."""

import math

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.retrieval.options import RetrievalOptions
from midus_hf.ops.dispatch.private_torch import is_in_backward

_BATCH_MOMENTUM, _BATCH_EPS = 0.1, 1e-5


class RetrievalMemory(MemoryModule):
    """A memory that looks slots up by a query per head, and weights their values by a softmax."""

    value_bank: torch.Tensor
    query_norm_weight: torch.Tensor
    query_norm_bias: torch.Tensor
    query_mean: torch.Tensor
    query_variance: torch.Tensor

    def __init__(self, options: RetrievalOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.num_heads, self.query_width = sizes.num_heads, options.query_width(sizes)
        self.k, self.query_norm = options.k, options.query_norm

    @property
    def num_slots(self) -> int:
        """N, number of slots that each head chooses from."""
        return self.value_bank.shape[-2]

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """Return the query of each head, `[B, T, H, query_width]`, for an attention output `[B, T, W]`.

        A batch norm that trains updates its statistics with these tokens, unless `track_statistics` is false.
        """
        raise NotImplementedError

    def retrieve(self, attention_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, float32, and slots, int64, of each head, both `[B, T, H, k]`; no side effects."""
        scores, slots = self.select(self.queries(attention_output, track_statistics=False))
        return scores.softmax(dim=-1), slots

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores, descending, and the slots of the best slots for each query, both `[B, T, H, k]`."""
        raise NotImplementedError

    def addressed(self, query: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """Return vectors to look slots up by: normalised queries `[..., H, query_width]`, or random ones."""
        if self.options.query_norm != "none":
            query = self.normalised(query, track_statistics)
        return query if self.options.addressing == "content" else random_directions(query)

    def normalised(self, query: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """Return the query after the norm of the options, computed in float32 at least."""
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        if self.options.query_norm == "layer":
            variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        else:
            mean, variance = self._batch_statistics(wide, track_statistics)
        scaled = (wide - mean) * torch.rsqrt(variance + _BATCH_EPS)
        return (scaled * self.query_norm_weight.to(wide.dtype) + self.query_norm_bias.to(wide.dtype)).to(query.dtype)

    def _batch_statistics(self, query: torch.Tensor, track: bool) -> tuple[torch.Tensor, torch.Tensor]:
        learns = self.training and self.query_norm_weight.requires_grad
        if not learns or query.numel() == 0:
            return self.query_mean.to(query.dtype), self.query_variance.to(query.dtype)
        variance, mean = torch.var_mean(query.flatten(0, -3), dim=0, correction=0)  # [H, query_width]
        if track and not is_in_backward():
            with torch.no_grad():
                tokens = math.prod(query.shape[:-2])
                unbiased = variance * (tokens / max(tokens - 1, 1))
                self.query_mean.lerp_(mean.to(self.query_mean.dtype), _BATCH_MOMENTUM)
                self.query_variance.lerp_(unbiased.to(self.query_variance.dtype), _BATCH_MOMENTUM)
        return mean, variance


def random_directions(vectors: torch.Tensor) -> torch.Tensor:
    """Return random directions with the lengths, shape and dtype of `vectors` `[..., d]`; no gradients.

    They are drawn from torch's generator of the device, whose state activation checkpointing restores.
    """
    wide = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    drawn = torch.randn_like(wide)
    tiny = torch.finfo(wide.dtype).tiny
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1]
    drawn_lengths = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True).clamp_min(tiny)  # [..., 1]
    return (drawn * (lengths / drawn_lengths)).to(vectors.dtype)
