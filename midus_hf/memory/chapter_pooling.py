"""What is pooled of a sequence to choose chapters by, for each scope of routing, and what is chosen."""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

from midus_hf.memory.token_places import TokenPlaces

_ALL_ARE_PROMPT = (
    "routing is 'prompt', and nothing says which tokens are the prompt: all of this pass are taken for it, and what is predicted "
    "behind one of them has seen those that follow. Give prompt_mask, or labels that begin with -100."
)


class Pooled(NamedTuple):
    """What chapters are chosen by.

    Args:
        states: `[B, U, D]`, one for each of U equal stretches of the T tokens; the last may be cut short.
        length: Tokens per stretch.
        counts: `[B, U]`, float32, the tokens of each stretch that are no padding.
        kept: What the next pass needs of this one, by name.
    """

    states: torch.Tensor
    length: int
    counts: torch.Tensor
    kept: dict[str, torch.Tensor]


class Routing(NamedTuple):
    """Which chapters the stretches of tokens read.

    Args:
        logits: `[B, U, C]`, float32 at least.
        chosen: `[B, U, k]`, int64, the routed chapters, the best first.
        log_weights: `[B, U, k]`, logarithms of their weights, which add up to 1.
        pooled: What they were chosen by.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    log_weights: torch.Tensor
    pooled: Pooled


def pool_tokens(hidden_states: torch.Tensor, places: TokenPlaces) -> Pooled:
    """Each token by itself."""
    real = places.real
    counts = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.float32) if real is None else real.float()
    return Pooled(hidden_states, 1, counts, {})


def pool_sequence(hidden_states: torch.Tensor, places: TokenPlaces) -> Pooled:
    """The mean over all tokens of a document, those that come later included."""
    if places.starts is None:
        return _pool_row(hidden_states, places.real, places.real)
    document = places.starts.long().cumsum(1)  # [B, T]
    sums = _zeros(hidden_states, hidden_states.shape).scatter_add(
        1, document.unsqueeze(-1).expand(hidden_states.shape), hidden_states.to(_wide(hidden_states))
    )
    sizes = torch.zeros_like(document).scatter_add(1, document, torch.ones_like(document)).clamp(min=1)
    means = (sums / sizes.unsqueeze(-1)).gather(1, document.unsqueeze(-1).expand(hidden_states.shape))
    return Pooled(means.to(hidden_states.dtype), 1, hidden_states.new_ones(document.shape, dtype=torch.float32), {})


def pool_prompt(
    hidden_states: torch.Tensor,
    places: TokenPlaces,
    prompt_mask: torch.Tensor | None,
    kept: Mapping[str, torch.Tensor],
) -> Pooled:
    """The mean over the tokens of the prompt, which later passes keep.

    Args:
        hidden_states: `[B, T, D]`.
        places: Of the tokens.
        prompt_mask: `[B, T]`, true for tokens of the prompt. Default: the first pass is the prompt.
        kept: What an earlier pass of the sequence left.

    Raises:
        ValueError: If a row holds several documents, or no token of a prompt.
    """
    batch, tokens, _ = hidden_states.shape
    if places.starts is not None:
        raise ValueError(
            "routing is 'prompt', and a row holds several documents; expected one prompt per row. Train without packing, or choose "
            "routing = 'chunk'."
        )
    if kept:
        states = kept["pooled"].to(hidden_states.dtype).unsqueeze(1)
        return Pooled(states, tokens, _counts(places.real, batch, tokens, hidden_states.device), {})
    chosen = places.real
    if prompt_mask is None:
        if not torch.compiler.is_compiling():  # a graph cannot warn
            warnings.warn(_ALL_ARE_PROMPT, stacklevel=2)
    else:
        chosen = prompt_mask.bool() if places.real is None else prompt_mask.bool() & places.real
        if not torch.compiler.is_compiling() and not chosen.any(dim=1).all():
            raise ValueError(
                "routing is 'prompt', and a row has no token of a prompt; expected prompt_mask to be true somewhere in each row, or "
                "labels that begin with -100. Plain text has no prompts: choose routing = 'chunk' for it."
            )
    pooled = _pool_row(hidden_states, chosen, places.real)
    return pooled._replace(kept={"pooled": pooled.states.squeeze(1).to(_wide(hidden_states))})


def pool_chunks(
    hidden_states: torch.Tensor, places: TokenPlaces, size: int, kept: Mapping[str, torch.Tensor]
) -> Pooled:
    """For each chunk of a document, the mean over the tokens of the document before it; zero for the first chunk.

    Sums are float32 at least. `kept` holds, per row, the `count` of tokens so far, their `total`, and the sum `before` the chunk
    that the next token belongs to.

    Args:
        hidden_states: `[B, T, D]`.
        places: Of the tokens; those of a row that are no padding stand together.
        size: Tokens per chunk.
        kept: What earlier passes of the sequence left.
    """
    if places.is_plain and not kept:
        return _pool_plain_chunks(hidden_states, places.real, size)
    batch, tokens, _ = hidden_states.shape
    wide, device = _wide(hidden_states), hidden_states.device
    real = torch.ones(batch, tokens, dtype=torch.bool, device=device) if places.real is None else places.real
    values = hidden_states.to(wide) * real.unsqueeze(-1)
    before_token = values.cumsum(1) - values  # [B, T, D]
    if kept:
        count, total, before = kept["count"], kept["total"].to(wide), kept["before"].to(wide)
    else:
        count = torch.zeros(batch, dtype=torch.int64, device=device)
        total = before = _zeros(hidden_states, (batch, hidden_states.shape[-1]))

    index = torch.arange(tokens, device=device).expand(batch, tokens)
    position = count.unsqueeze(1) + real.long().cumsum(1) - 1  # [B, T], in the row
    document_base = total.unsqueeze(1)  # what of the sums belongs to the document
    if places.starts is not None:
        start = torch.where(places.starts, index, -1).cummax(1).values  # [B, T], -1 in the first document
        first = position.gather(1, start.clamp(min=0))
        position = torch.where(start >= 0, position - first, position)
        document_base = torch.where((start >= 0).unsqueeze(-1), -_at(before_token, start), document_base)
    within = position % size
    chunk_start = torch.where(real & (within == 0), index, -1).cummax(1).values  # -1: begun in an earlier pass
    sums = torch.where(
        (chunk_start >= 0).unsqueeze(-1), _at(before_token, chunk_start) + document_base, before.unsqueeze(1)
    )
    chunk_position = (position - within).clamp(min=1).unsqueeze(-1)
    states = (sums / chunk_position).to(hidden_states.dtype)

    last = torch.where(real, index, 0).amax(1, keepdim=True)  # [B, 1]
    has_token = real.any(1)
    new_count = torch.where(has_token, position.gather(1, last).squeeze(1) + 1, count)
    own_total = total + values.sum(1)
    if places.starts is not None:
        last_start = torch.where(places.starts, index, -1).amax(1, keepdim=True)
        own_total = torch.where(
            last_start >= 0, own_total - total - _at(before_token, last_start).squeeze(1), own_total
        )
    new_before = torch.where(has_token.unsqueeze(-1), _at(sums, last).squeeze(1), before)
    new_before = torch.where((new_count % size == 0).unsqueeze(-1), own_total, new_before)
    return Pooled(states, 1, real.float(), {"count": new_count, "total": own_total, "before": new_before})


def _pool_plain_chunks(hidden_states: torch.Tensor, real: torch.Tensor | None, size: int) -> Pooled:
    """As `pool_chunks` for rows that begin here, with padding behind them alone."""
    batch, tokens, width = hidden_states.shape
    wide, chunks = _wide(hidden_states), -(-tokens // size)
    values = hidden_states.to(wide)
    if real is not None:
        values = values * real.unsqueeze(-1)
    padded = torch.nn.functional.pad(values, (0, 0, 0, chunks * size - tokens))
    sums = padded.unflatten(1, (chunks, size)).sum(2)  # [B, U, D]
    zero = sums.new_zeros(batch, 1, width)
    up_to = torch.cat(
        [zero, sums.cumsum(1)], dim=1
    )  # [B, U + 1, D], before each chunk, and before the one behind them
    counts = _chunk_counts(real, batch, tokens, size, hidden_states.device)
    seen = torch.cat([counts.new_zeros(batch, 1), counts.cumsum(1)], dim=1)  # [B, U + 1]
    states = up_to[:, :-1] / seen[:, :-1].clamp(min=1).unsqueeze(-1)
    count = seen[:, -1].long()
    kept = {"count": count, "total": up_to[:, -1], "before": _at(up_to, (count // size).unsqueeze(1)).squeeze(1)}
    return Pooled(states.to(hidden_states.dtype), size, counts, kept)


def _chunk_counts(real: torch.Tensor | None, batch: int, tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """Tokens `[B, U]` of each chunk that are no padding."""
    chunks = -(-tokens // size)
    if real is None:
        ends = torch.arange(1, chunks + 1, device=device).mul(size).clamp(max=tokens).float()
        return torch.diff(ends, prepend=ends.new_zeros(1)).expand(batch, chunks)
    padded = torch.nn.functional.pad(real.float(), (0, chunks * size - tokens))
    return padded.unflatten(1, (chunks, size)).sum(2)


def _pool_row(hidden_states: torch.Tensor, chosen: torch.Tensor | None, real: torch.Tensor | None) -> Pooled:
    """The mean over some tokens of each row, for all of its tokens."""
    batch, tokens, _ = hidden_states.shape
    wide = hidden_states.to(_wide(hidden_states))
    if chosen is None:
        states = wide.mean(1, keepdim=True)
    else:
        sums = (wide * chosen.unsqueeze(-1)).sum(1, keepdim=True)
        states = sums / chosen.sum(1).clamp(min=1)[:, None, None]
    return Pooled(states.to(hidden_states.dtype), tokens, _counts(real, batch, tokens, hidden_states.device), {})


def _counts(real: torch.Tensor | None, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Tokens `[B, 1]` of each row that are no padding."""
    if real is None:
        return torch.full((batch, 1), float(tokens), device=device)
    return real.sum(1, keepdim=True).float()


def _at(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """States `[B, S, D]` at an index `[B, T]`; below zero, the first."""
    return states.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def _wide(hidden_states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden_states.dtype, torch.float32)


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=_wide(like), device=like.device)
