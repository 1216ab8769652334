"""Packs at the places where the tokens of a pass read them."""

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.memories.hosting.heads import moved_by
from midus_hf.memories.packs.opening import PackKey, Reading
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.reading import Pack

_MAX_PACKS_PER_PART = 8


class PackPart(NamedTuple):
    """Packs that T' tokens of a pass read."""

    tokens: slice
    slots: torch.Tensor | None  # `[B, S']`, which of the S slots of the pass the rows read; None: those of the row
    reads: torch.Tensor  # `[B, T', S']`, bool, whether a token reads a slot
    bias: torch.Tensor | None  # `[B, T', S']`, float32, added to the scores; None for 0
    # `[G, B, S', r]`, radians that move keys to their place by kind of rotation; None: in place.
    angles: torch.Tensor | None


class OpenPacks(NamedTuple):
    """Packs that the tokens of a pass read."""

    # For each layer, keys and values of all packs, side by side, `[K, S, d]` both; or by row, `[B, K, S, d]` both.
    heads: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    parts: tuple[PackPart, ...]
    is_open: torch.Tensor  # `[B, T]`, bool, whether a token reads any
    is_whole: bool  # whether every token reads all slots of its row
    kinds: tuple[int, ...]  # the kind of rotation of each layer

    def of(self, layer: int, part: PackPart, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for a part, `[B, K, S', d]` both, by a layer's number among those with packs."""
        keys, values = self.heads[layer]
        if part.slots is not None:
            keys, values = (heads[:, part.slots].transpose(0, 1) for heads in (keys, values))
        if part.angles is not None:
            keys = moved_by(attention, keys, part.angles[self.kinds[layer]])
        return keys, values

    def by_layer(self, part: PackPart, attentions: Sequence[Any]) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Return what `of` returns for each layer; keys of all layers are moved at once if they have one shape."""
        still = part._replace(angles=None)
        heads = [self.of(layer, still, each) for layer, each in enumerate(attentions)]
        kinds = {(keys.shape, each.config.rotates) for (keys, _), each in zip(heads, attentions, strict=True)}
        if part.angles is None or len(kinds) > 1:
            return tuple(self.of(layer, part, each) for layer, each in enumerate(attentions))
        moved = moved_by(
            attentions[0], torch.cat([keys for keys, _ in heads]), part.angles[list(self.kinds)].flatten(0, 1)
        )
        return tuple(zip(moved.split(len(heads[0][0])), (values for _, values in heads), strict=True))

    def to(self, device: Any, non_blocking: bool = False) -> "OpenPacks":
        """Return the packs on another device."""

        def moved(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        parts = tuple(PackPart(part.tokens, *map(moved, part[1:])) for part in self.parts)
        heads = tuple((moved(key), moved(value)) for key, value in self.heads)
        return self._replace(heads=heads, parts=parts, is_open=moved(self.is_open))


def open_packs(
    rows: Sequence[Sequence[Reading]],
    num_tokens: int,
    packs: Mapping[PackKey, Pack],
    angles: torch.Tensor,
    options: PacksOptions,
    device: Any,
    dtype: torch.dtype,
) -> OpenPacks:
    """Return the packs that the T tokens of a pass read, for a model's device and dtype.

    Args:
        rows: What the tokens of each row read; some do.
        num_tokens: T.
        packs: The packs that are read, without those whose entries were removed since.
        angles: `[L, r]`, float64, angles by which a position rotates the keys of each layer.
        options: Options of the memory.
    """
    rows = [[each for each in row if each.pack in packs] for row in rows]
    read = {each.pack: packs[each.pack] for row in rows for each in row}
    ends = [0, *itertools.accumulate(pack.heads[0][0].shape[1] for pack in read.values())]
    firsts = dict(zip(read, ends, strict=False))
    heads = tuple(
        tuple(torch.cat([pack.heads[layer][part] for pack in read.values()], 1).to(device, dtype) for part in (0, 1))
        for layer in range(len(angles))
    )
    by_kind, kinds = angles.unique(dim=0, return_inverse=True)
    is_open = torch.zeros(len(rows), num_tokens, dtype=torch.bool)
    for number, row in enumerate(rows):
        for reading in row:
            is_open[number, reading.start : reading.stop] = True
    parts, is_whole = [], True
    for tokens in _token_parts(rows):
        slots, moves, reads, bias = _slots(rows, tokens, read, firsts, options)
        is_whole = is_whole and bool(reads.all())
        # In float64, since positions are large and angles are counted by whole turns.
        moved = (moves - options.distance)[:, :, None].double()  # [B, S', 1]
        turned = (moved * by_kind[:, None, None]) % (2 * torch.pi)
        turned = turned.to(device, torch.promote_types(dtype, torch.float32))
        added = bias.to(device) if bias.any() else None
        parts.append(PackPart(tokens, slots.to(device), reads.to(device), added, turned))
    if len(rows) == len(parts) == 1 and parts[0].reads.shape[2] == ends[-1]:  # nothing to gather
        parts[0] = parts[0]._replace(slots=None)
        heads = tuple((keys[None], values[None]) for keys, values in heads)
    return OpenPacks(heads, tuple(parts), is_open.to(device), is_whole, tuple(kinds.tolist()))  # type: ignore[arg-type]


def _token_parts(rows: Sequence[Sequence[Reading]]) -> list[slice]:
    """Return neighbouring tokens for which each row reads few packs, and some row reads one."""
    bounds = sorted({bound for row in rows for each in row for bound in (each.start, each.stop)})
    starts = [[each.start for each in row] for row in rows]
    parts: list[slice] = []
    union: list[set[tuple[PackKey, int]]] = []
    for start, stop in itertools.pairwise(bounds):
        latest = [row[: bisect_right(begins, start)][-1:] for row, begins in zip(rows, starts, strict=True)]
        read = [{(each.pack, each.position) for each in row if each.stop > start} for row in latest]
        if not any(read):
            continue
        both = [before | now for before, now in zip(union, read, strict=True)] if union else read
        if parts and parts[-1].stop == start and max(map(len, both)) <= _MAX_PACKS_PER_PART:
            parts[-1], union = slice(parts[-1].start, stop), both
        else:
            parts.append(slice(start, stop))
            union = read
    return parts


def _slots(
    rows: Sequence[Sequence[Reading]],
    tokens: slice,
    packs: Mapping[PackKey, Pack],
    firsts: Mapping[PackKey, int],
    options: PacksOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return slots that tokens read, moves of keys, `[B, S']`, who reads them, and biases, `[B, T', S']`."""
    slots: list[list[int]] = [[] for _ in rows]
    moves: list[list[int]] = [[] for _ in rows]
    reads: list[tuple[int, slice, slice, float]] = []
    for number, row in enumerate(rows):
        columns: dict[tuple[PackKey, int], slice] = {}
        for each in row:
            if each.start >= tokens.stop or each.stop <= tokens.start:
                continue
            key = each.pack, each.position
            if key not in columns:
                pack, first, count = packs[each.pack], firsts[each.pack], len(slots[number])
                length = pack.heads[0][0].shape[1]
                columns[key] = slice(count, count + length)
                slots[number] += range(first, first + length)
                moves[number] += [each.position - length - pack.first] * length
            start, stop = max(each.start, tokens.start), min(each.stop, tokens.stop)
            bias = options.chat_score_bias if each.pack.in_chat else options.score_bias
            reads.append((number, slice(start - tokens.start, stop - tokens.start), columns[key], bias))
    most = max(map(len, slots))
    mask = torch.zeros(len(rows), tokens.stop - tokens.start, most, dtype=torch.bool)
    added = torch.zeros(mask.shape)
    for number, read_by, read, bias in reads:
        mask[number, read_by, read] = True
        added[number, read_by, read] = bias
    filled = [torch.tensor([each + [0] * (most - len(each)) for each in both]) for both in (slots, moves)]
    return filled[0], filled[1], mask, added
