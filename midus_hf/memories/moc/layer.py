"""The memory layer of Mixture of Chapters."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.memories.decode_cache import MAX_CACHED, DecodeCache
from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.memories.hosting.service import Reports, RouterReport, Service, States, Tables, Tokens, WholeSequences
from midus_hf.memories.hosting.sites import BehindAttention, BehindLayer
from midus_hf.memories.hosting.state import MemoryState
from midus_hf.memories.moc.options import MocOptions
from midus_hf.memories.moc.pooling import (
    ChunkSizes,
    Numbers,
    Routing,
    pool_chunks,
    pool_sequence,
    pool_tokens,
)
from midus_hf.memories.module import MemoryModule, random_directions
from midus_hf.memories.options import package_only
from midus_hf.memories.registry import register_layer
from midus_hf.ops.dispatch.calling import wide_dtype, without_autocast
from midus_hf.ops.moc.op import chapter_attention

_RMS_EPS = 1e-6
# If there are this many times more choices than chapters, nearly every chapter is chosen.
_MANY_TIMES = 4


@register_layer(MocOptions)
class MocMemory(MemoryModule):
    """Cross-attention of tokens to the chapters that a router chose for them (section 5, algorithm 1)."""

    is_croppable = False
    sites = (BehindAttention, BehindLayer)
    services: tuple[type[Service], ...] = (Tables, Tokens, States, WholeSequences, Reports)

    options: MocOptions
    #: Whether the gradient of the bank is a sparse tensor of the rows that were read; training may set it.
    sparse_gradient: bool
    bank: torch.Tensor  # where layers do not share one
    norm_weight: torch.Tensor
    router_weight: torch.Tensor
    router_bias: torch.Tensor
    query_projection: nn.Linear
    key_projection: nn.Linear
    value_projection: nn.Linear
    output_projection: nn.Linear

    def __init__(self, options: MocOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.num_heads, self.head_dim = sizes.num_heads, sizes.hidden_size // sizes.num_heads
        self.num_chapters, self.num_shared = options.chapters, options.shared_chapters
        left_out = {"chunk": (WholeSequences,), "token": (States, WholeSequences), "sequence": ()}[options.routing]
        self.services = tuple(service for service in type(self).services if service not in left_out)
        self.sparse_gradient = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        tables: Mapping[str, torch.Tensor] | None = None,
        tokens: TokenPlaces | None = None,
        state: MemoryState | None = None,
        report: RouterReport | None = None,
    ) -> torch.Tensor:
        """Read, for each token, the chapters that the router chose for it; return what is added, `[B, T, D]`.

        Args:
            hidden_states: `[B, T, D]`.
            tables: The bank, if layers share one. Default: the layer's bank.
            tokens: Padding and documents. Default: no padding, one document per row.
            state: Of the sequence; refused if routing is `sequence` and it is not empty. Default: no state is kept.
            report: Receives the router's logits and losses. Default: not reported.
        """
        if hidden_states.shape[0] == 0 or hidden_states.shape[1] == 0:
            return hidden_states * 0
        normalised = _rms_normalised(hidden_states)
        routing = self._route(normalised, tokens, state)
        if state is not None:
            state.keep(routing.pooled.kept)
        if report is not None:
            self._report(routing, report)
        chapters, scales = self._mixture(routing)
        keys, values, chapters = self._memory_tokens(tables or {}, chapters, hidden_states)

        def attend(query: torch.Tensor, numbers: Numbers) -> torch.Tensor:
            return chapter_attention(query, keys, values, chapters[numbers], scales[numbers])

        query = self.query_projection(normalised * self.norm_weight.to(normalised.dtype))
        query = query.unflatten(-1, (self.num_heads, self.head_dim))  # [B, T, H, d]
        output = routing.pooled.segments.read(query, attend)
        return self.output_projection(output.flatten(-2))

    @package_only
    def route(
        self, hidden_states: torch.Tensor, tokens: TokenPlaces | None = None, state: MemoryState | None = None
    ) -> Routing:
        """Choose chapters, with the arguments of `forward`, without side effects."""
        return self._route(_rms_normalised(hidden_states), tokens, state)

    def _route(self, normalised: torch.Tensor, tokens: TokenPlaces | None, state: MemoryState | None) -> Routing:
        """Choose the chapters that each token, chunk or sequence reads in addition to shared ones."""
        # In trained models a few elements are far larger in every token, and would make the means of all texts nearly equal.
        limited, places, kept = normalised.clamp(-1, 1), tokens or TokenPlaces(), {} if state is None else state.kept
        if self.options.routing == "chunk":
            sizes = ChunkSizes(self.options.first_tokens, self.options.chunk_size)
            pooled = pool_chunks(limited, places, sizes, kept, keeps=state is not None)
        elif kept and self.options.routing == "sequence":
            raise RequestError(
                "routing is 'sequence', which looks at the whole sequence, and a cache holds a part of it; expected passes without a "
                "cache. Set use_cache to false, or upscale with routing = 'chunk'."
            )
        else:
            pooled = (pool_tokens if self.options.routing == "token" else pool_sequence)(limited, places)
        states = pooled.states if self.options.addressing == "content" else random_directions(pooled.states)
        wide = torch.promote_types(normalised.dtype, torch.float32)
        with without_autocast(normalised.device.type):
            logits = nn.functional.linear(states.to(wide), self.router_weight.to(wide), self.router_bias.to(wide))
        shared = self.options.shared_chapters
        best = logits[..., shared:].topk(self.options.k, dim=-1)
        return Routing(logits, best.indices + shared, best.values.log_softmax(-1), pooled)

    def _mixture(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all chapters that are read, shared ones first, and their scales, both `[N, S + k]`."""
        shared = torch.arange(self.options.shared_chapters, device=routing.chosen.device)
        shared = shared.expand(*routing.chosen.shape[:-1], -1)
        chapters = torch.cat([shared, routing.chosen], dim=-1)
        total = self.options.shared_chapters + self.options.routed_scale
        weights = routing.log_weights
        logs = [torch.zeros_like(shared, dtype=weights.dtype), weights + math.log(self.options.routed_scale)]
        return chapters, (torch.cat(logs, dim=-1) - math.log(total)).exp()

    def _memory_tokens(
        self, tables: Mapping[str, torch.Tensor], chapters: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values `[C', M, H, d]` of chapters, and those each segment reads, `[N, n]`."""
        shape = (self.num_heads, self.head_dim)
        if self.decode_cache is not None:
            kept = self.decode_cache.read(self, like, tables)
            if kept is not None:
                keys, values = kept.unflatten(-1, shape).unbind()
                return keys, values, chapters
        bank = tables["bank"] if "bank" in tables else self.bank
        read, chapters = self._read_chapters(chapters)
        gives_rows = read is not None and self.sparse_gradient and bank.requires_grad and bank.is_leaf
        gives_rows = gives_rows and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        rows = _memory_rows(self.options, bank, read, like.dtype, gives_rows)
        keys, values = self.key_projection(rows), self.value_projection(rows)  # [C', M, H * d]
        return keys.unflatten(-1, shape), values.unflatten(-1, shape), chapters

    def _read_chapters(self, chapters: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the chapters to project `[C']`, None for all, and where `chapters` `[N, S + k]` are in them."""
        shared, every = self.options.shared_chapters, self.options.chapters
        chosen = chapters[:, shared:]
        at_most = shared + chosen.numel()
        if torch.compiler.is_compiling():
            if at_most >= every:
                return None, chapters
            read = torch.cat([chapters[0, :shared], chosen.flatten()])
            places = torch.arange(shared, at_most, device=chapters.device).view(chosen.shape)
            return read, torch.cat([chapters[:, :shared], places], dim=1)
        if at_most >= _MANY_TIMES * every:
            return (torch.arange(every, device=chapters.device) if self.sparse_gradient else None), chapters
        return torch.unique(chapters, return_inverse=True)

    def _report(self, routing: Routing, report: RouterReport) -> None:
        logits, chosen, counts = routing.logits, routing.chosen, routing.pooled.counts
        first = 0 if self.options.balance == "released" else self.options.shared_chapters
        candidates = logits[:, first:]  # [N, C - S]: logits that no choice depends on must not change the loss
        balance = self.options.router_aux_loss_coef * balance_loss(candidates, chosen - first, counts)
        report(logits, balance + self.options.router_z_loss_coef * z_loss(candidates, counts))

    @package_only
    def make_decode_cache(self) -> DecodeCache | None:
        """Return a cache for keys and values of the whole bank; None for a large bank."""
        if 2 * self.options.memory_tokens * self.num_heads * self.head_dim > MAX_CACHED:
            return None
        names = ("bank", "key_projection.weight", "value_projection.weight")
        return DecodeCache(names, partial(derive_all, self.options))


def _memory_rows(
    options: MocOptions,
    bank: torch.Tensor,
    chapters: torch.Tensor | None,
    dtype: torch.dtype,
    gives_rows: bool = False,
) -> torch.Tensor:
    """Return memory tokens `[C', M, W]` of distinct chapters `[C']` of a bank, or of all, to be projected."""
    if gives_rows and chapters is not None:
        numbers = torch.arange(options.chapter_tokens, device=chapters.device)  # [M]
        rows = nn.functional.embedding(chapters.unsqueeze(1) * options.chapter_tokens + numbers, bank, sparse=True)
    else:
        rows = bank.unflatten(0, (options.chapters, options.chapter_tokens))  # [C, M, W]
        rows = rows if chapters is None else rows.index_select(0, chapters)
    return _rms_normalised(rows).to(dtype)


def derive_all(
    options: MocOptions, bank: torch.Tensor, key_weight: torch.Tensor, value_weight: torch.Tensor
) -> torch.Tensor:
    """Return keys and values `[2, C, M, H * d]` of a whole bank, by the weights of both projections."""
    rows = _memory_rows(options, bank, None, key_weight.dtype)
    return torch.stack([nn.functional.linear(rows, key_weight), nn.functional.linear(rows, value_weight)])


def _rms_normalised(states: torch.Tensor) -> torch.Tensor:
    wide = states.to(wide_dtype(states))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _RMS_EPS)).to(states.dtype)


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return Switch Transformer's load-balance loss, float32 at least (Fedus et al. 2021, equation 4).

    The loss is `C * sum_i f_i P_i`: `f_i`, a constant, is the share of tokens with chapter i among the k `chosen` `[S, k]`, int64;
    `P_i` is its mean probability by `logits` `[S, C]`. Segments weigh by their `counts` of tokens `[S]`, without padding. An even
    choice gives k.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    shares = (counts / counts.sum().clamp(min=1)).to(wide)  # [S]
    probabilities = (logits.to(wide).softmax(-1) * shares.unsqueeze(-1)).sum(0)  # [C]
    chosen_shares = shares.unsqueeze(-1).expand(chosen.shape)
    frequencies = torch.zeros_like(probabilities).scatter_add(0, chosen.flatten(), chosen_shares.flatten())
    return logits.shape[-1] * (frequencies * probabilities).sum()


def z_loss(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return logits' mean squared log-sum-exp over tokens (ST-MoE, eq. 5); arguments as of `balance_loss`."""
    squares = logits.to(wide_dtype(logits)).logsumexp(-1).square()
    return (squares * counts).sum() / counts.sum().clamp(min=1)
