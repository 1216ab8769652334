"""Keys and values of entries: computed by passes over texts, kept, moved to where tokens read them."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import Rotation, moved_by
from midus_hf.memories.packs.glossary import LoadedGlossary
from midus_hf.memories.packs.opening import PackKey, Reading
from midus_hf.memories.packs.options import PacksOptions

RECORDING = "pack_recording"

_TEXTS_PER_PASS = 64
# A power of two: the angle of this position gives that of one position precisely, for any dtype of cosines and sines.
_LATEST_POSITION = 4096
_MAX_PACKS_PER_PART = 8
# Maximum number of tokens of packs that are kept with a cache, if a pass reads no more: those that were read last.
_MAX_KEPT_TOKENS = 1 << 15
_SEPARATOR = "\n"


class Pack(NamedTuple):
    """Keys and values of a text per layer with packs, `[K, m, d]`, rotated to positions from `first` on."""

    heads: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    first: int


class Recording:
    """Keys and values that attention reads in a pass, by the layer's number among those with packs."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(
        self, layer: int, attention: Any, key: torch.Tensor, value: torch.Tensor, rotation: Rotation | None
    ) -> None:
        """Record keys and values, `[B, K, T, d]`, and the pass's rotation; refuse one by complex numbers."""
        self.heads[layer] = key, value
        if rotation is not None and not isinstance(rotation, tuple):
            raise RequestError(
                f"{type(attention).__name__} rotates keys by complex numbers; expected cosines and sines. Choose another method."
            )
        if rotation is None or not attention.config.rotates:
            none = torch.zeros_like(key[:, 0])
            rotation = none + 1, none
        self.turns[layer] = rotation


class PackReader:
    """Computes packs by passes of a stack, `run`, over texts."""

    def __init__(self, options: PacksOptions):
        self._options = options
        # With the dtype of the model, since cosines and sines are rounded to it.
        self._angles: tuple[torch.dtype, torch.Tensor] | None = None

    def angles(self, run: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return angles by which a position rotates keys, `[L, r]`, float64, in radians; 0 without rotation.

        Computed from those of a later position, which is more precise, since its whole turns are known.
        """
        if self._angles is None or self._angles[0] != dtype:
            powers = [[1 << power for power in range(_LATEST_POSITION.bit_length())]]
            positions = torch.tensor(powers, device=device)
            turns = _record(run, torch.zeros_like(positions), positions).turns
            found = []
            for layer in sorted(turns):
                cos, sin = (part[0].double().cpu() for part in turns[layer])  # [T, r]
                angle = torch.atan2(sin[0], cos[0])
                for at in range(1, len(cos)):
                    within = torch.atan2(sin[at], cos[at])
                    whole = ((angle * 2**at - within) / (2 * torch.pi)).round()
                    angle = (within + 2 * torch.pi * whole) / 2**at
                found.append(angle)
            self._angles = dtype, torch.stack(found)
        return self._angles[1]

    def read(self, run: Any, glossary: LoadedGlossary, keys: Sequence[PackKey], device: Any) -> dict[PackKey, Pack]:
        """Return packs, without entries that were removed, and without packs that have none left.

        The first token of a pass is an attention sink (arXiv 2309.17453). A second one would take attention from both; so texts are
        read after tokens that are not part of their packs, as in APE (arXiv 2502.05431).
        """
        numbers = dict.fromkeys(number for key in keys for number in key.entries)
        texts = glossary.tokens_of(numbers, self._options.max_tokens)
        (separator,) = glossary.spelling.ids_of([_SEPARATOR], special_tokens=False)
        ids: dict[PackKey, list[int]] = {}
        for key in keys:
            parts = [texts[number] for number in key.entries if number in texts]
            if parts:
                parts += [[*key.words]] if key.words else []
                ids[key] = [token for part in parts for token in (*separator, *part)][len(separator) :]
        packs: dict[PackKey, Pack] = {}
        for in_chat in {key.in_chat for key in ids}:
            prefix, chosen = glossary.token_prefix(in_chat), [key for key in ids if key.in_chat == in_chat]
            for first in range(0, len(chosen), _TEXTS_PER_PASS):
                part = {key: [*prefix, *ids[key]] for key in chosen[first : first + _TEXTS_PER_PASS]}
                tokens = torch.zeros(len(part), max(map(len, part.values())), dtype=torch.int64)
                for row, each in enumerate(part.values()):
                    tokens[row, : len(each)] = torch.tensor(each)
                positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
                heads = [heads for _, heads in sorted(_record(run, tokens.to(device), positions).heads.items())]
                for row, (key, each) in enumerate(part.items()):
                    text = slice(len(prefix), len(each))
                    pack = tuple((keys_[row, :, text], values[row, :, text]) for keys_, values in heads)
                    packs[key] = Pack(pack, len(prefix))
        return packs


def _record(run: Any, ids: torch.Tensor, positions: torch.Tensor) -> Recording:
    recording = Recording()
    run(input_ids=ids, position_ids=positions, use_cache=False, **{RECORDING: recording})
    return recording


class KeptPacks:
    """Packs read for the sequences of a cache; like its keys and values, they belong to its weights."""

    def __init__(self) -> None:
        self._packs: dict[PackKey, Pack] = {}
        #: What the last step of a generation read, and its packs at their places.
        self.step: tuple[Any, OpenPacks] | None = None

    def take(
        self, wanted: Mapping[PackKey, Any], read: Callable[[Sequence[PackKey]], dict[PackKey, Pack]]
    ) -> dict[PackKey, Pack]:
        """Return packs, reading those that are not kept; packs that were read long ago are dropped."""
        packs = {key: self._packs.pop(key) for key in wanted if key in self._packs}
        if missing := [key for key in wanted if key not in packs]:
            packs |= read(missing)
        self._packs |= packs
        num_tokens = 0
        for key, pack in reversed([*self._packs.items()]):
            num_tokens += pack.heads[0][0].shape[1]
            if num_tokens > _MAX_KEPT_TOKENS and key not in packs:
                del self._packs[key]
        return packs


class PackPart(NamedTuple):
    """Packs that T' tokens of a pass read."""

    tokens: slice
    slots: torch.Tensor | None  # `[B, S']`, which of the S slots of the pass the rows read; None: those of the row
    reads: torch.Tensor  # `[B, T', S']`, bool, whether a token reads a slot
    bias: torch.Tensor | None  # `[B, T', S']`, float32, added to the scores; None for 0
    angles: (
        torch.Tensor | None
    )  # `[G, B, S', r]`, radians that move keys to their place by kind of rotation; None: in place


class OpenPacks(NamedTuple):
    """Packs that the tokens of a pass read."""

    # For each layer, keys and values of all packs, side by side, `[K, S, d]` both; or by row, in place, `[B, K, S, d]` both.
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

    def in_place(self, attentions: Sequence[Any]) -> "OpenPacks":
        """Return packs of one part whose keys are at their places, for many passes."""
        (part,) = self.parts
        heads = tuple(self.of(layer, part, attention) for layer, attention in enumerate(attentions))
        return self._replace(heads=heads, parts=(part._replace(slots=None, angles=None),))

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
    ends = itertools.accumulate(pack.heads[0][0].shape[1] for pack in read.values())
    firsts = dict(zip(read, (0, *ends), strict=False))
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
    return OpenPacks(heads, tuple(parts), is_open.to(device), is_whole, tuple(kinds.tolist()))  # type: ignore[arg-type]


def _token_parts(rows: Sequence[Sequence[Reading]]) -> list[slice]:
    """Return neighbouring tokens for which each row reads few packs, and some row reads one."""
    bounds = sorted({bound for row in rows for each in row for bound in (each.start, each.stop)})
    starts = [[each.start for each in row] for row in rows]
    parts: list[slice] = []
    union: list[set[tuple[PackKey, int]]] = []
    for start, stop in itertools.pairwise(bounds):
        latest = [row[: bisect_right(begins, start)][-1:] for row, begins in zip(rows, starts, strict=True)]
        read = [{(each.pack, each.place) for each in row if each.stop > start} for row in latest]
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
            key = each.pack, each.place
            if key not in columns:
                pack, first, count = packs[each.pack], firsts[each.pack], len(slots[number])
                length = pack.heads[0][0].shape[1]
                columns[key] = slice(count, count + length)
                slots[number] += range(first, first + length)
                moves[number] += [each.place - length - pack.first] * length
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
