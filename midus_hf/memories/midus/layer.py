"""Layers of the memories of MIDUS, which retrieve slots: head-wise memory (HML), and its baselines."""

import math
from typing import Any

import torch
from torch import nn

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.decode_cache import DecodeCache
from midus_hf.memories.hosting.service import TrainedTokens
from midus_hf.memories.midus.options import MidusHmlOptions, MidusLinearOptions, MidusPkmOptions, RetrievalOptions
from midus_hf.memories.module import MemoryModule, random_directions
from midus_hf.memories.options import package_only
from midus_hf.memories.registry import register_layer
from midus_hf.ops.dispatch.private_torch import is_in_backward
from midus_hf.ops.gather.op import weighted_gather
from midus_hf.ops.midus_hml.op import MAX_EXPANDED, expand_values, headwise_memory
from midus_hf.ops.product_key.op import flat_key_topk, product_key_topk

_BATCH_MOMENTUM, _BATCH_EPS = 0.1, 1e-5


class RetrievalMemory(MemoryModule):
    """A memory that looks slots up by a query per head, and weights their values by a softmax."""

    services: tuple[type[TrainedTokens], ...] = (TrainedTokens,)

    value_bank: torch.Tensor
    query_norm_weight: torch.Tensor
    query_norm_bias: torch.Tensor
    query_mean: torch.Tensor
    query_variance: torch.Tensor

    def __init__(self, options: RetrievalOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.num_heads, self.query_width = sizes.num_heads, options.query_width(sizes)
        self.k, self.query_norm = options.k, options.query_norm
        self.services = self.needed_services(options)

    @classmethod
    def needed_services(cls, options: RetrievalOptions) -> tuple[Any, ...]:
        """Return the services that a memory of these options needs: statistics of a batch leave padding out."""
        return cls.services if options.query_norm == "batch" else ()

    @property
    @package_only
    def num_slots(self) -> int:
        """N, number of slots that each head chooses from."""
        return self.value_bank.shape[-2]

    def queries(
        self, attention_output: torch.Tensor, track_statistics: bool = True, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the query of each head, `[B, T, H, query_width]`, for an attention output `[B, T, W]`.

        A batch norm that trains updates its statistics with these tokens, unless `track_statistics` is false. They are those of the
        `real` ones, `[B, T]`, bool. Default: no token is padding.
        """
        raise NotImplementedError

    @package_only
    def retrieve(self, attention_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, float32, and slots, int64, of each head, both `[B, T, H, k]`; no side effects."""
        scores, slots = self.select(self.queries(attention_output, track_statistics=False))
        return scores.softmax(dim=-1), slots

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores, descending, and the slots of the best slots for each query, both `[B, T, H, k]`."""
        raise NotImplementedError

    def addressed(
        self, query: torch.Tensor, track_statistics: bool = True, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return vectors to look slots up by: normalised queries `[..., H, query_width]`, or random ones."""
        if self.options.query_norm != "none":
            query = self.normalised(query, track_statistics, real)
        return query if self.options.addressing == "content" else random_directions(query)

    def normalised(
        self, query: torch.Tensor, track_statistics: bool = True, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the query after the norm of the options, computed in float32 at least."""
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        if self.options.query_norm == "layer":
            variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        else:
            mean, variance = self._batch_statistics(wide, track_statistics, real)
        scaled = (wide - mean) * torch.rsqrt(variance + _BATCH_EPS)
        return (scaled * self.query_norm_weight.to(wide.dtype) + self.query_norm_bias.to(wide.dtype)).to(query.dtype)

    def _batch_statistics(
        self, query: torch.Tensor, track: bool, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of queries, `[H, query_width]`: the batch's in training, else running."""
        learns = self.training and self.query_norm_weight.requires_grad
        if not learns or query.numel() == 0:
            return self.query_mean.to(query.dtype), self.query_variance.to(query.dtype)
        flat = query.flatten(0, -3)  # [S, H, query_width]
        momentum: Any = _BATCH_MOMENTUM
        tokens: Any = math.prod(query.shape[:-2])
        if real is None:
            variance, mean = torch.var_mean(flat, dim=0, correction=0)  # [H, query_width]
            unbiased = variance.detach() * (tokens / max(tokens - 1, 1))
        else:
            is_real = real.reshape(-1, 1, 1)
            tokens = is_real.sum().to(query.dtype)
            mean = torch.where(is_real, flat, 0).sum(0) / tokens.clamp(min=1)
            variance = torch.where(is_real, flat - mean, 0).square().sum(0) / tokens.clamp(min=1)
            unbiased = variance.detach() * (tokens / (tokens - 1).clamp(min=1))
            momentum = is_real.any().to(self.query_mean.dtype) * momentum  # a batch of padding teaches nothing
        if track and not is_in_backward():
            with torch.no_grad():
                self.query_mean.lerp_(mean.to(self.query_mean.dtype), momentum)
                self.query_variance.lerp_(unbiased.to(self.query_variance.dtype), momentum)
        return mean, variance


@register_layer(MidusHmlOptions)
class MidusHmlMemory(RetrievalMemory):
    """A memory per head, queried by its output of any width (MIDUS, section 4.2, equations 11 to 17)."""

    row_keys: torch.Tensor
    column_keys: torch.Tensor
    value_transform: torch.Tensor

    def __init__(self, options: MidusHmlOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.head_dim, self.value_dim = self.query_width, sizes.hidden_size // sizes.num_heads

    def queries(
        self, attention_output: torch.Tensor, track_statistics: bool = True, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        by_head = attention_output.reshape(*attention_output.shape[:-1], self.num_heads, self.head_dim)
        return self.addressed(by_head, track_statistics, real)

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)

    def forward(
        self, attention_output: torch.Tensor, residual: torch.Tensor | None = None, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values for the heads' outputs side by side `[B, T, H * d]`, plus `residual` if given."""
        shape = attention_output.shape[:-1]
        tokens = math.prod(shape)  # S = B * T; `numel` would fix the sizes of a traced graph
        flat = attention_output.reshape(tokens, self.num_heads, self.head_dim)  # [S, H, d]
        query = self.addressed(flat, real=real)
        residual_by_head = None
        if residual is not None:
            residual_by_head = residual.reshape(tokens, self.num_heads, self.value_dim)
        expanded = None if self.decode_cache is None else self.decode_cache.read(self, attention_output)
        bank, transform = (self.value_bank, self.value_transform) if expanded is None else (expanded, None)
        keys = (self.row_keys, self.column_keys)
        output = headwise_memory(query, *keys, bank, transform, self.k, residual=residual_by_head)  # [S, H, D / H]
        return output.reshape(*shape, self.num_heads * self.value_dim)

    @package_only
    def make_decode_cache(self) -> DecodeCache | None:
        """Return a cache for the values of all heads; None for more values than `MAX_EXPANDED`."""
        if self.num_heads * self.value_bank.numel() > MAX_EXPANDED:
            return None
        return DecodeCache(("value_bank", "value_transform"), expand_values)


class SharedValueMemory(RetrievalMemory):
    """A memory with a query projection, keys per head, and values that all heads read and sum over."""

    query_projection: nn.Linear

    def queries(
        self, attention_output: torch.Tensor, track_statistics: bool = True, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        query = self.query_projection(attention_output)  # [B, T, D]
        query = query.unflatten(-1, (self.num_heads, self.query_width))
        return self.addressed(query, track_statistics, real)

    def forward(
        self, attention_output: torch.Tensor, residual: torch.Tensor | None = None, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values `[B, T, D]`, summed over heads (MIDUS, equation 15), plus `residual` if given."""
        scores, slots = self.select(self.queries(attention_output, real=real))  # [B, T, H, k]
        bank, weights = self.value_bank.to(attention_output.dtype), scores.softmax(dim=-1)
        output = weighted_gather(bank, slots.flatten(-2), weights.flatten(-2))  # [B, T, D]
        return output if residual is None else (residual + output).to(residual.dtype)


@register_layer(MidusLinearOptions)
class MidusLinearMemory(SharedValueMemory):
    """Keys, all compared with every query, over shared values of full width (MIDUS, equations 4 and 5)."""

    slot_keys: torch.Tensor

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat_key_topk(query, self.slot_keys, self.k)


@register_layer(MidusPkmOptions)
class MidusPkmMemory(SharedValueMemory):
    """Product keys over shared values of full width (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    row_keys: torch.Tensor
    column_keys: torch.Tensor

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)
