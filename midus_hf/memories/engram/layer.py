"""Engram: rows by the last tokens, a gate, and a convolution over earlier tokens; also in vLLM."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT, EngramOptions
from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.memories.hosting.service import States, Tables, Tokens
from midus_hf.memories.hosting.sites import BehindAttention, BehindLayer, BesideFeedForward
from midus_hf.memories.hosting.state import (
    SPARE_TOKENS,
    MemoryState,
    latest_tokens,
    reordered,
    text_order,
    without_last,
)
from midus_hf.memories.hosting.vllm import SlotState, SlotStates
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import register_layer
from midus_hf.ops.dispatch.calling import wide_dtype
from midus_hf.ops.engram import NO_TOKEN, hashed_rows, known_rows, ngram_keys, numbered, windows
from midus_hf.ops.gather.op import weighted_gather

_GATE_EPS = 1e-6


@register_layer(EngramOptions)
class EngramMemory(MemoryModule):
    """Rows of the n-grams that end at each token, gated by the hidden state (arXiv 2601.07372, section 2).

    The result for a token is `v + SiLU(convolution of RMSNorm(v))`, v = gate * W_v e, where e are the rows of the token side by
    side, gate = sigmoid(sign(g) sqrt|g|), g = <RMSNorm(W_k e), RMSNorm(h)> / sqrt(D), and h the hidden state. It is zero where the
    rows of the token and of the tokens under the convolution are zero.
    """

    forward_arguments = ("input_ids",)
    sites = (BesideFeedForward, BehindAttention, BehindLayer)
    services = (Tables, Tokens, States)
    rollback = staticmethod(without_last)

    options: EngramOptions
    value_table: torch.Tensor
    key_projection: nn.Linear
    value_projection: nn.Linear
    query_norm_weight: torch.Tensor
    key_norm_weight: torch.Tensor
    convolution_norm_weight: torch.Tensor
    convolution: torch.Tensor

    def __init__(self, options: EngramOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.sparse_gradient = False
        self.dilation = options.max_order
        self.moduli = options.moduli
        self.numbers_before = options.max_order - 1
        self.values_before = max(0, options.kernel - 1) * self.dilation
        self.kept_before = max(self.numbers_before, self.values_before)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        tables: Mapping[str, torch.Tensor] | None = None,
        tokens: TokenPlaces | None = None,
        state: MemoryState | None = None,
    ) -> torch.Tensor:
        """Read the rows of the n-grams that end at each token; return what is added, `[B, T, D]`.

        Args:
            hidden_states: `[B, T, D]`.
            input_ids: `[B, T]`, ids of the tokens.
            tables: `token_numbers` `[V]` and `ngrams` `[N]`, int64, where the options have them.
            tokens: Padding and documents. Default: no padding, one document per row.
            state: State of the sequence from earlier passes. Default: the sequence begins here, and no state is kept.
        """
        places, kept = tokens or TokenPlaces(), {} if state is None else state.kept
        numbers = self.numbers_of(input_ids, tables or {}, places)  # [B, T]
        document = None if places.starts is None else places.starts.long().cumsum(1)
        order = text_order(places.real, continues=bool(kept))
        place = None if order is None else order.argsort(1)
        document_in_order = None if document is None else reordered(document, order)
        before = self._before(kept, "numbers", self.numbers_before, numbers)
        rows = self.rows_read(reordered(numbers, order), tables or {}, document_in_order, before)
        rows = reordered(rows, place)
        is_known = rows != 0 if self.options.table == "exact" else torch.ones_like(rows)
        weights = is_known.to(wide_dtype(self.value_table)).unsqueeze(-1)
        weights = F.dropout(weights, self.options.row_dropout, self.training)
        read = weighted_gather(self.value_table, rows.unsqueeze(-1), weights, sparse_gradient=self.sparse_gradient)
        read = read.flatten(-2)  # [B, T, E]
        added = self._gated(hidden_states, read.to(hidden_states.dtype))
        keeping = {"numbers": numbers}
        if self.options.kernel:
            normed = _normalised(added, self.convolution_norm_weight)
            if places.real is not None:
                normed = normed * places.real.unsqueeze(-1)
            before = self._before(kept, "values", self.values_before, normed)
            convolved = self._convolved(torch.cat([before, reordered(normed, order)], 1), document_in_order)
            added = added + F.silu(reordered(convolved, place))
            keeping["values"] = normed
        if state is not None:
            state.keep(self._kept_after(kept, keeping, document))
        return added

    def numbers_of(
        self, input_ids: torch.Tensor, tables: Mapping[str, torch.Tensor], places: TokenPlaces
    ) -> torch.Tensor:
        """Return the number of each token, `[B, T]`, int64, from 1; `NO_TOKEN` for padding."""
        numbers = numbered(input_ids.long(), tables["token_numbers"] if self.options.known_tokens else None)
        return numbers if places.real is None else torch.where(places.real, numbers, NO_TOKEN)

    def _before(self, kept: Mapping[str, torch.Tensor], name: str, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return what is kept of the last `count` tokens, `[B, count, ...]`; zeros before the sequence."""
        if name in kept:
            return latest_tokens(kept[name], kept["numbers"] != NO_TOKEN, count).to(like.dtype)
        return like.new_zeros(len(like), count, *like.shape[2:])

    def rows_read(
        self,
        numbers: torch.Tensor,
        tables: Mapping[str, torch.Tensor],
        document: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows that each token reads, `[B, T, rows per token]`, int64.

        Args:
            numbers: `[B, T]`, as `numbers_of` returns them.
            tables: `ngrams`, if the table is exact.
            document: `[B, T]`, each token's document, from 0. Default: a row is one document.
            before: `[B, P]`, numbers of the tokens before the pass. Default: none.
        """
        skipped = 0 if before is None else before.shape[1]
        if before is not None:
            numbers = torch.cat([before, numbers], 1)
        if document is not None:
            document = F.pad(document, (skipped, 0))
        around = windows(numbers, self.options.max_order, document)[:, skipped:]
        if self.options.table == "exact":
            known = tables["ngrams"] if self.options.known_ngrams else numbers.new_zeros(0)
            keys = [ngram_keys(around, order, TOKEN_NUMBER_LIMIT) for order in self.options.orders]
            rows = torch.stack([known_rows(each, known) for each in keys], dim=-1)
            rows = rows.clamp(max=self.options.num_slots - 1)
            if self.options.match == "longest":
                longer = rows.flip(-1).cumsum(-1).flip(-1) - rows  # above 0 where a longer n-gram has a row
                rows = torch.where(longer == 0, rows, 0)
            is_random = self.options.addressing == "random"
            return _drawn(rows, [self.options.num_slots] * rows.shape[-1]) if is_random else rows
        heads = self.options.hash_heads
        multipliers = self.options.multipliers(self.index)
        by_order = [
            hashed_rows(around, order, multipliers, self.moduli[number * heads : (number + 1) * heads])
            for number, order in enumerate(self.options.orders)
        ]
        rows = torch.cat(by_order, dim=-1)
        if self.options.addressing == "random":
            rows = _drawn(rows, self.moduli)
        return rows + torch.arange(rows.shape[-1], device=rows.device) * self.options.rows

    def _gated(self, hidden_states: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        query = _normalised(hidden_states, self.query_norm_weight)
        key = _normalised(self.key_projection(read), self.key_norm_weight)
        match = (query * key).sum(-1, keepdim=True, dtype=wide_dtype(read)) / math.sqrt(hidden_states.shape[-1])
        # Below the limit the root has no gradient, which would be infinite at zero.
        gate = torch.sigmoid(match.abs().clamp(min=_GATE_EPS).sqrt() * match.sign())
        return gate.to(read.dtype) * self.value_projection(read)

    def _convolved(self, values: torch.Tensor, document: torch.Tensor | None) -> torch.Tensor:
        """Return each token's weighted sum of values of its document, from `[B, P + T, D]`, P kept ones."""
        length = values.shape[1] - self.values_before
        document = None if document is None else F.pad(document, (self.values_before, 0))
        taps = self.convolution.to(values.dtype)
        total = taps[0] * values[:, self.values_before :]
        for tap in range(1, self.options.kernel):
            first = self.values_before - tap * self.dilation
            earlier = values[:, first : first + length]
            if document is not None:
                same = document[:, first : first + length] == document[:, self.values_before :]
                earlier = earlier * same.unsqueeze(-1)
            total = total + taps[tap] * earlier
        return total

    def _kept_after(
        self, kept: Mapping[str, torch.Tensor], keeping: Mapping[str, torch.Tensor], document: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the state after the pass: the last document's last tokens, and how many can be taken back.

        These are at the end as they stand in the cache, with padding, and before them are the last ones that are no padding.
        """
        numbers = keeping["numbers"]
        spare = kept["spare"] if "spare" in kept else torch.full_like(numbers[:, 0], SPARE_TOKENS)
        after = {"spare": (spare + numbers.shape[1]).clamp(max=SPARE_TOKENS)}
        is_real = None
        for name, new in keeping.items():
            zeros = new.new_zeros(len(new), self.kept_before + SPARE_TOKENS, *new.shape[2:])
            whole = torch.cat([kept[name].to(new.dtype) if name in kept else zeros, new], 1)
            if document is not None:
                last = F.pad(document, (zeros.shape[1], 0)) == document[:, -1:]
                whole = whole * last.view(*last.shape, *(1,) * (whole.dim() - 2))
            earlier, latest = whole[:, :-SPARE_TOKENS], whole[:, -SPARE_TOKENS:]
            is_real = earlier != NO_TOKEN if is_real is None else is_real  # by the numbers, which come first
            after[name] = torch.cat([latest_tokens(earlier, is_real, self.kept_before), latest], 1)
        return after


def _normalised(states: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = wide_dtype(states)
    return F.rms_norm(states.to(wide), gain.shape, gain.to(wide), _GATE_EPS).to(states.dtype)


def _drawn(rows: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """Return rows drawn at random, below a limit per row of a token, in the shape of `rows`."""
    return torch.stack([torch.randint_like(rows[..., number], limit) for number, limit in enumerate(limits)], dim=-1)


class PagedEngramMemory(EngramMemory):
    """The memory in vLLM: T tokens of several requests are T sequences of one token; states by cache slot."""

    services = (Tables, SlotStates)  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        tables: Mapping[str, torch.Tensor] | None = None,
        state: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Read rows as `EngramMemory` does, of `[1, T, D]` and ids `[1, T]`; `state` is a `SlotState`."""
        each = hidden_states.transpose(0, 1)
        return super().forward(each, input_ids=input_ids.transpose(0, 1), tables=tables, state=state).transpose(0, 1)

    def _before(self, kept: Any, name: str, count: int, like: torch.Tensor) -> torch.Tensor:
        """Keep each token's row, `[T, 1, ...]`, and return those of earlier tokens that are read."""
        slots: SlotState = kept["slots"]
        return slots.earlier(name, like[:, 0], range(count, 0, -self.dilation if name == "values" else -1))

    def _convolved(self, values: torch.Tensor, document: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of values `[T, kernel, D]`, the token's own last."""
        taps = self.convolution.to(values.dtype)
        total = taps[0] * values[:, -1:]
        for tap in range(1, self.options.kernel):
            total = total + taps[tap] * values[:, -1 - tap].unsqueeze(1)
        return total

    def _kept_after(self, *_: Any) -> dict[str, torch.Tensor]:
        """Return no state: rows are stored when computed."""
        return {}
