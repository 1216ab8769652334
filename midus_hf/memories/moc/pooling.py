"""Pooling of hidden states into the states that choose chapters, and segments that read the same ones.

Hidden states are divided by their root mean square first, and elements clamped to -1 ... 1. The first token of a document is left
out unless it is the only one: in trained models it is an attention sink, whose state is large and similar in all texts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.ops.dispatch.calling import wide_dtype
from midus_hf.ops.moc.op import min_together

Numbers = slice | torch.Tensor

# Function that reads for tokens `[S, L, ...]`, one row for each of the numbered segments, and returns `[S, L, ...]`.
Read = Callable[[torch.Tensor, Numbers], torch.Tensor]


@dataclass(frozen=True)
class Segments:
    """Segments in any order, by token, `[B, T]`, int64, from 0 to N - 1; every token reads separately."""

    segment_of_token: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        """Read for tokens `[B, T, ...]`, each in its segment, and return `[B, T, ...]`."""
        separate = tokens.flatten(0, 1).unsqueeze(1)  # [B * T, 1, ...]
        return read(separate, self.segment_of_token.flatten()).squeeze(1).unflatten(0, self.segment_of_token.shape)


@dataclass(frozen=True)
class EqualSegments(Segments):
    """Segments of `length` tokens each that follow each other."""

    length: int

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        by_segment = tokens.reshape(-1, self.length, *tokens.shape[2:])
        output = read(by_segment, slice(None))
        return output.reshape(*tokens.shape[:2], *output.shape[2:])


@dataclass(frozen=True)
class PaddedSegments(Segments):
    """Segments of different lengths, which are padded to equal length."""

    numbers: torch.Tensor  # [S], int64, the segment of each row; several rows may have one segment
    room: int  # L, tokens per row
    places: torch.Tensor  # [B * T], int64, of each token among the S * L; S * L for padding, which reads nothing

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        flat = tokens.flatten(0, 1)
        count = len(self.numbers) * self.room
        laid_out = flat.new_zeros(count + 1, *flat.shape[1:]).index_copy(0, self.places, flat)[:count]
        output = read(laid_out.unflatten(0, (len(self.numbers), self.room)), self.numbers).flatten(0, 1)
        with_nothing = torch.cat([output, output.new_zeros(1, *output.shape[1:])])
        return with_nothing.index_select(0, self.places).unflatten(0, tokens.shape[:2])


def padded(
    segment_of_token: torch.Tensor,
    first_tokens: torch.Tensor,
    room: int,
    *,
    alike: torch.Tensor | None = None,
    alike_room: int = 0,
    shrinks: bool = False,
) -> Segments:
    """Lay segments of consecutive tokens side by side, padded to equal length, unless it does not pay off.

    Args:
        segment_of_token: `[B, T]`, int64; -1 for padding.
        first_tokens: `[N]`, int64, position of each segment's first token among the B * T tokens.
        room: Largest number of tokens in a segment.
        alike: `[B, T]`, bool, the tokens of segment 0 if they need not be consecutive. Default: None.
        alike_room: Largest number of these tokens, which get as many rows as they fill. Default: 0.
        shrinks: Whether to shrink `room` to the longest segment, which waits for the device. Default: false.
    """
    flat = segment_of_token.flatten()
    every = (flat >= 0).cumsum(0)  # tokens up to each, without padding, which may stand between them
    if shrinks:
        at_once = flat if alike is None else flat.masked_fill(alike.flatten(), -1)
        longest = int((every - every[first_tokens[flat.clamp(min=0)]]).masked_fill(at_once < 0, 0).max()) + 1
        room = min(room, max(longest, min_together()))  # shorter rows would be read token by token
    if room < min_together():
        return Segments(segment_of_token.clamp(min=0))
    copies, skipped = -(-alike_room // room), 0 if alike is None else 1
    others = torch.arange(skipped, len(first_tokens), device=flat.device)
    numbers = torch.cat([others.new_zeros(copies), others])
    places = (copies + flat - skipped) * room + every - every[first_tokens[flat.clamp(min=0)]]
    if alike is not None:
        places = torch.where(alike.flatten(), alike.flatten().cumsum(0) - 1, places)
    places = torch.where(flat >= 0, places, len(numbers) * room)
    return PaddedSegments(segment_of_token.clamp(min=0), numbers, room, places)


class PooledStates(NamedTuple):
    """Pooled states, by which chapters are chosen, one for each segment of tokens that is routed as one."""

    states: torch.Tensor  # [N, D], float32 at least
    segments: Segments
    counts: torch.Tensor  # [N], float32, tokens in each segment, without padding
    kept: dict[str, torch.Tensor]  # tensors that the next pass needs


class Routing(NamedTuple):
    """Chapters that the segments of tokens read."""

    logits: torch.Tensor  # [N, C], float32 at least
    chosen: torch.Tensor  # [N, k], int64, the routed chapters, the best first
    log_weights: torch.Tensor  # [N, k], logarithms of their weights, which add up to 1
    pooled: PooledStates


class ChunkSizes(NamedTuple):
    """Sizes of a document's chunks, which begin at 0, at `first`, and then at each multiple of `size`."""

    first: int  # F, tokens of the first chunk, 2 or more; later chunks are guided: tokens before a chunk choose its chapters
    size: int  # tokens of later chunks; if F < size, the chunk that begins at F ends at size

    def begins(self, position: torch.Tensor) -> torch.Tensor:
        """Return whether a guided chunk begins at each position in a document."""
        return (position >= self.first) & ((position == self.first) | (position % self.size == 0))

    def start(self, position: torch.Tensor) -> torch.Tensor:
        """Return the first position of the chunk that each position is in."""
        start = position - position % self.size
        return torch.where(position < self.first, 0, start.clamp(min=self.first))

    def most(self, tokens: int, rows: int, *, continues: bool, holds_documents: bool) -> int:
        """Return the largest number of guided chunks that B rows of T tokens of any documents can have."""
        if continues:  # at most: the last token of a chunk, and then whole chunks
            within = min(tokens, (tokens + self.size - 2) // self.size + 1)
        else:
            within = max(0, -(-tokens // self.size) - (self.first == self.size)) if tokens > self.first else 0
        if holds_documents:
            # g guided chunks need F + 1 tokens or more, and (g - 1) size + 1 or more if g > 1; g size + 1 or more if F = size.
            is_split = self.first < self.size
            least_tokens = min(2 * (self.first + 1), self.size + 1)
            documents = 2 * tokens // least_tokens if is_split else max(0, tokens - 1) // self.size
            within = min(tokens, documents + (within if continues else 0))
        return rows * within


def pool_tokens(states: torch.Tensor, places: TokenPlaces) -> PooledStates:
    """Return the state of each token as a segment by itself, with the arguments of `pool_chunks`."""
    segment_of_token = torch.arange(states.shape[0] * states.shape[1], device=states.device).view(states.shape[:2])
    counts = _real(states, places).float().flatten()
    return PooledStates(states.flatten(0, 1), EqualSegments(segment_of_token, 1), counts, {})


def pool_sequence(states: torch.Tensor, places: TokenPlaces) -> PooledStates:
    """Return the mean over all tokens of each document, later ones too; arguments as of `pool_chunks`.

    Packed documents are counted, which waits for the device, and padded to the longest; a compiled graph assumes one per token.
    """
    batch, tokens, width = states.shape
    if places.starts is None:
        wide = states.to(wide_dtype(states))
        if places.real is None:
            means = wide[:, min(1, tokens - 1) :].mean(1)
            counts = torch.full((batch,), float(tokens), device=states.device)
        else:
            others = places.real & (places.real.long().cumsum(1) > 1)
            pooled = torch.where(others.any(1, keepdim=True), others, places.real)
            means = (wide * pooled.unsqueeze(-1)).sum(1) / pooled.sum(1, keepdim=True).clamp(min=1)
            counts = places.real.sum(1).float()
        return PooledStates(means, _equal_segments(batch, tokens, states.device), counts, {"seen": counts})
    real = _real(states, places)
    document = (_marks(places, states).flatten().cumsum(0) - 1).view(batch, tokens)
    number = batch * tokens if torch.compiler.is_compiling() else int(document[-1, -1]) + 1
    position = _positions(places, real, None)
    sizes = torch.zeros(number, dtype=torch.int64, device=states.device)
    sizes = sizes.index_add(0, document.flatten(), real.long().flatten())
    pooled = real & ((position > 0) | (sizes[document] == 1))
    added = (states.to(wide_dtype(states)) * pooled.unsqueeze(-1)).flatten(0, 1)
    sums = _zeros(states, (number, width)).index_add(0, document.flatten(), added)
    means = sums / (sizes - 1).clamp(min=1).unsqueeze(-1)
    segment_of_token = torch.where(real, document, -1)
    if torch.compiler.is_compiling():
        segments = Segments(document)
    else:
        every = torch.arange(batch * tokens, device=states.device)
        at = torch.where(real & (position == 0), document, number).flatten()
        first_tokens = torch.zeros(number + 1, dtype=torch.int64, device=states.device).scatter_(0, at, every)[:-1]
        segments = padded(segment_of_token, first_tokens, tokens, shrinks=True)
    return PooledStates(means, segments, sizes.float(), {"seen": torch.ones(batch, device=states.device)})


def pool_chunks(
    states: torch.Tensor, places: TokenPlaces, sizes: ChunkSizes, kept: Mapping[str, torch.Tensor], keeps: bool = True
) -> PooledStates:
    """Return each chunk's mean over its document's tokens before it; zero for the first chunk.

    All first chunks read the same chapters, so they form segment 0, unless a pass has one token per row. There is one segment per
    later chunk; in a compiled graph, and for rows of one document, the largest possible number. Sums are float32 at least.

    Args:
        states: `[B, T, D]`, normalised and limited hidden states.
        places: Padding and documents.
        sizes: Of the chunks.
        kept: Tensors that earlier passes of the sequence kept, per row: the `count` of tokens so far, the sum `total` of all these
            tokens except the first, and the sum of the tokens `before` the chunk that the next token belongs to.
        keeps: Whether to keep tensors for later passes. Default: true.
    """
    if states.shape[1] == 1:
        return _pool_step(states, places, sizes, kept)
    real = _real(states, places)
    count, total, before = _kept_of(states, kept)
    position = _positions(places, real, count)  # [B, T], in the document
    values = states.to(wide_dtype(states)) * (real & (position > 0)).unsqueeze(-1)
    marks = _marks(places, states)
    guided, number, first_tokens, num_beginning = _guided_chunks(places, sizes, real, position, bool(kept))
    start = sizes.start(position.flatten()[first_tokens])
    sums = _sums_before_chunks(values, marks, number, first_tokens)
    if kept:
        row = first_tokens // real.shape[1]
        goes_on = (marks.cumsum(1) == 1).flatten()[first_tokens]  # in the first document of its row
        continues = goes_on & (start <= count[row])
        sums = torch.where(continues.unsqueeze(-1), before[row], sums + total[row] * goes_on.unsqueeze(-1))
    unguided = torch.arange(first_tokens.shape[0], device=states.device) == 0
    means = torch.where(unguided.unsqueeze(-1), 0, sums / (start - 1).clamp(min=1).unsqueeze(-1))
    chunk_of_token = torch.where(guided.flatten(), number, 0).view(real.shape)
    each = real.to(wide_dtype(states)).flatten()
    counts = _zeros(states, (first_tokens.shape[0],)).index_add(0, chunk_of_token.flatten(), each).float()
    if places.starts is not None and torch.compiler.is_compiling():
        segments = Segments(chunk_of_token)
    else:
        rooms = {"room": min(sizes.size, real.shape[1]), "alike_room": num_beginning}
        numbers, alike, shrinks = torch.where(real, chunk_of_token, -1), real & ~guided, places.starts is not None
        segments = padded(numbers, first_tokens, **rooms, alike=alike, shrinks=shrinks)
    pooled = PooledStates(means, segments, counts, {})
    if not keeps:
        return pooled
    rows = torch.arange(real.shape[0], device=states.device)
    last = torch.where(real, torch.arange(real.shape[1], device=states.device), 0).amax(1)  # [B]
    has_token = real.any(1)
    new_count = torch.where(has_token, position[rows, last] + 1, count)
    document_of_row = marks.cumsum(1)  # [B, T]
    is_last = document_of_row == document_of_row[:, -1:]
    went_on = (document_of_row[:, -1] == 1).unsqueeze(-1)  # from an earlier pass
    new_total = (values * is_last.unsqueeze(-1)).sum(1) + total * went_on
    next_start = sizes.start(new_count)
    new_before = torch.where((next_start == new_count).unsqueeze(-1), new_total, sums[chunk_of_token[rows, last]])
    new_before = torch.where((next_start == 0).unsqueeze(-1), 0, new_before)
    new_before = torch.where(has_token.unsqueeze(-1), new_before, before)
    return pooled._replace(kept={"count": new_count, "total": new_total, "before": new_before})


def _guided_chunks(
    places: TokenPlaces, sizes: ChunkSizes, real: torch.Tensor, position: torch.Tensor, continues: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return which tokens are guided, the latest chunk at each, first tokens, and segment 0's room."""
    batch, tokens = real.shape
    guided = real & (position >= sizes.first)
    begins = guided & sizes.begins(position)
    if continues:  # the first token of a row may be in the middle of a chunk
        begins = begins | (guided & (real.long().cumsum(1) == 1))
    number = begins.flatten().cumsum(0)
    holds = places.starts is not None
    if holds and not torch.compiler.is_compiling():
        num_chunks, num_beginning = torch.stack([number[-1], (real & ~guided).sum()]).tolist()
    else:
        num_chunks = sizes.most(tokens, batch, continues=continues, holds_documents=holds)
        num_beginning = batch * min(tokens, sizes.first)
    at, every = torch.where(begins.flatten(), number, 0), torch.arange(batch * tokens, device=real.device)
    first_tokens = torch.zeros(num_chunks + 1, dtype=torch.int64, device=real.device).scatter_(0, at, every)
    return guided, number, first_tokens, num_beginning


def _sums_before_chunks(
    values: torch.Tensor, marks: torch.Tensor, number: torch.Tensor, first_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the sum of each document's values before each chunk, `[N, D]`, of this pass only."""
    all_chunks, device = first_tokens.shape[0], values.device
    document = marks.flatten().cumsum(0) - 1
    document_of = document[first_tokens].index_fill(0, torch.zeros(1, dtype=torch.int64, device=device), -1)  # [N]
    following = (number + 1).clamp(max=all_chunks - 1)
    follows = (number < number[-1]) & (document_of[following] == document)
    into = _zeros(values, (all_chunks, values.shape[-1])).index_add(
        0, torch.where(follows, following, 0), values.flatten(0, 1) * follows.unsqueeze(-1)
    )
    # Sums run over all documents. The sum of one document is a difference, in float64, so that others add no rounding error.
    up_to = into.double().cumsum(0)  # [N, D]
    is_other = torch.cat([document_of.new_zeros(1, dtype=torch.bool), document_of[1:] != document_of[:-1]])
    first_of_document = torch.where(is_other, torch.arange(all_chunks, device=device), 0).cummax(0).values
    return (up_to - up_to[(first_of_document - 1).clamp(min=0)]).to(values.dtype)


def _pool_step(
    states: torch.Tensor, places: TokenPlaces, sizes: ChunkSizes, kept: Mapping[str, torch.Tensor]
) -> PooledStates:
    """Pool chunks for one token per row, each a segment, without sorting or waiting for the device."""
    batch = len(states)
    real, state = _real(states, places)[:, 0], states[:, 0].to(wide_dtype(states))
    count, total, before = _kept_of(states, kept)
    guided = real & (count >= sizes.first)
    means = torch.where(guided.unsqueeze(-1), before / (sizes.start(count) - 1).clamp(min=1).unsqueeze(-1), 0)
    new_count = count + real
    new_total = total + state * (real & (count > 0)).unsqueeze(-1)
    new_before = torch.where((real & sizes.begins(new_count)).unsqueeze(-1), new_total, before)
    new = {"count": new_count, "total": new_total, "before": new_before}
    return PooledStates(means, _equal_segments(batch, 1, states.device), real.float(), new)


def _kept_of(
    states: torch.Tensor, kept: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's count `[B]`, total and before `[B, D]`; zeros if the sequence begins here."""
    if kept:
        return kept["count"], kept["total"].to(wide_dtype(states)), kept["before"].to(wide_dtype(states))
    batch, _, width = states.shape
    nothing = _zeros(states, (batch, width))
    return torch.zeros(batch, dtype=torch.int64, device=states.device), nothing, nothing


def _positions(places: TokenPlaces, real: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """Return each token's position in its document, `[B, T]`; `count` `[B]` precede the first document."""
    position = real.long().cumsum(1) - 1
    if count is not None:
        position = position + count.unsqueeze(1)
    if places.starts is None:
        return position
    index = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    start = torch.where(places.starts, index, -1).cummax(1).values  # -1 in the first document
    first = position.gather(1, start.clamp(min=0))
    return torch.where(start >= 0, position - first, position)


def _marks(places: TokenPlaces, states: torch.Tensor) -> torch.Tensor:
    """Return whether a row or a document begins at each token, `[B, T]`."""
    first = (torch.arange(states.shape[1], device=states.device) == 0).expand(states.shape[:2])
    return first if places.starts is None else first | places.starts


def _real(states: torch.Tensor, places: TokenPlaces) -> torch.Tensor:
    if places.real is not None:
        return places.real
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)


def _equal_segments(batch: int, tokens: int, device: torch.device) -> EqualSegments:
    return EqualSegments(torch.arange(batch, device=device).unsqueeze(1).expand(batch, tokens), tokens)


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=wide_dtype(like), device=like.device)
