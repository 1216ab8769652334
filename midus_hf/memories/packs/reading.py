"""Keys and values of entries: computed by a model's pass over their texts, and moved to their places for tokens that read them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import Rotation, moved_by
from midus_hf.memories.packs.opening import PackKey, Reading
from midus_hf.memories.packs.options import PacksOptions

# Number of texts per pass.
_TEXTS_AT_ONCE = 64
# A power of two: the angle of this position gives that of one position precisely, for any dtype of cosines and sines.
_LATEST_POSITION = 4096
# Largest number of packs that the tokens of a part read in one row.
_PACKS_AT_ONCE = 8


class Pack(NamedTuple):
    """Keys and values of a text.

    Args:
        heads: Keys and values in each layer with packs, `[K, m, d]` both, keys rotated to the positions of the pass that read them.
        first: Position of the text's first token in that pass.
    """

    heads: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    first: int


class Recording:
    """Keys and values that the attention of each layer with packs reads in a pass, by the number of the layer among them."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(
        self, layer: int, attention: Any, key: torch.Tensor, value: torch.Tensor, rotation: Rotation | None
    ) -> None:
        """Record keys and values, `[B, K, T, d]`, and the rotation of the pass.

        Raises:
            RequestError: If the family rotates by complex numbers, as Llama 4 does.
        """
        self.heads[layer] = key, value
        if rotation is not None and not isinstance(rotation, tuple):
            raise RequestError(
                f"{type(attention).__name__} rotates keys by complex numbers; expected cosines and sines. Choose another method."
            )
        if rotation is None or not attention.config.rotates:
            none = torch.zeros_like(key[:, 0])
            rotation = none + 1, none
        self.turns[layer] = rotation


def rotation_angles(run: Callable[..., Any], device: Any) -> torch.Tensor:
    """Return the angles by which a position rotates the keys of each layer, `[L, r]`, float64, in radians; 0 where none is rotated.

    The angle of position 1 is computed from that of a later position, which is more precise, since its whole turns are known.

    Args:
        run: Function of ids `[1, T]`, positions `[1, T]` and a `Recording`, which runs the model's stack of layers.
        device: Device of the model.
    """
    positions = torch.tensor([[1 << power for power in range(_LATEST_POSITION.bit_length())]], device=device)
    recording = Recording()
    run(torch.zeros_like(positions), positions, recording)
    found = []
    for layer in sorted(recording.turns):
        cos, sin = (part[0].double().cpu() for part in recording.turns[layer])  # [T, r]
        angle = torch.atan2(sin[0], cos[0])
        for at in range(1, len(cos)):
            within = torch.atan2(sin[at], cos[at])
            whole = ((angle * 2**at - within) / (2 * torch.pi)).round()
            angle = (within + 2 * torch.pi * whole) / 2**at
        found.append(angle)
    return torch.stack(found)


def read_texts(
    run: Callable[..., Any], texts: Sequence[Sequence[int]], in_front: Sequence[int], device: Any
) -> list[Pack]:
    """Return the pack of each text, from ids, which a model reads a few at a time.

    The first token of a pass is an attention sink (arXiv 2309.17453), to which other tokens attend whatever it is. A sequence has
    one, and each pack would add another, which takes attention from both; so texts are read after tokens that are not part of
    their packs, as in APE (arXiv 2502.05431).

    Args:
        run: Function of ids `[B, T]`, positions `[B, T]` and a `Recording`, which runs the model's stack of layers.
        texts: Token ids of each text, one or more.
        in_front: P token ids that are put before each text. Keys of a text are rotated to the positions from P on.
        device: Device of the model.
    """
    packs: list[Pack] = []
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        part = [[*in_front, *ids] for ids in texts[first : first + _TEXTS_AT_ONCE]]
        tokens = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)] = torch.tensor(ids)
        recording = Recording()
        run(tokens.to(device), torch.arange(tokens.shape[1], device=device).expand(tokens.shape), recording)
        for row, ids in enumerate(part):
            layers = [recording.heads[layer] for layer in sorted(recording.heads)]
            of_text = slice(len(in_front), len(ids))
            heads = tuple((key[row, :, of_text], value[row, :, of_text]) for key, value in layers)
            packs.append(Pack(heads, len(in_front)))
    return packs


class PackPart(NamedTuple):
    """Packs that some tokens of a pass read.

    Args:
        tokens: The T' tokens.
        slots: `[B, S']`, which of the S slots of the pass the rows read; None for keys and values that belong to a single row.
        reads: `[B, T', S']`, bool, whether a token reads a slot.
        bias: `[B, T', S']`, float32, number added to the score of each slot; None for 0.
        angles: `[G, B, S', r]`, angles in radians by which keys are moved to their place, for each kind of rotation; None for keys
            that are in place.
    """

    tokens: slice
    slots: torch.Tensor | None
    reads: torch.Tensor
    bias: torch.Tensor | None
    angles: torch.Tensor | None


class OpenPacks(NamedTuple):
    """Packs that the tokens of a pass read.

    Args:
        heads: For each layer, keys and values of all packs that the pass reads, side by side, `[K, S, d]` both; or of each row,
            at their places, `[B, K, S, d]` both.
        parts: The tokens, part by part.
        is_open: `[B, T]`, bool, whether a token reads any.
        is_whole: Whether every token reads all slots of its row.
        kinds: The kind of rotation of each layer with packs.
    """

    heads: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    parts: tuple[PackPart, ...]
    is_open: torch.Tensor
    is_whole: bool
    kinds: tuple[int, ...]

    def of(self, layer: int, part: PackPart, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for the tokens of a part, each `[B, K, S', d]`.

        Args:
            layer: Number of the layer among those with packs.
            part: The part.
            attention: The layer's attention, which says how keys are rotated.
        """
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
    """Return the packs that the tokens of a pass read.

    Args:
        rows: What the tokens of each row read; some do.
        num_tokens: T, tokens of the pass.
        packs: The packs that are read.
        angles: `[L, r]`, float64, angles by which a position rotates the keys of each layer.
        options: Options of the memory.
        device: Device of the model.
        dtype: Dtype of the model.
    """
    # An entry may have been removed since its name was found.
    rows = [[each for each in row if each.pack in packs] for row in rows]
    read = {each.pack: packs[each.pack] for row in rows for each in row}
    lengths = {key: pack.heads[0][0].shape[1] for key, pack in read.items()}
    firsts = dict(zip(read, _sums_before(lengths.values()), strict=True))
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
        turned = ((moved * by_kind[:, None, None]) % (2 * torch.pi)).to(
            device, torch.promote_types(dtype, torch.float32)
        )
        added = bias.to(device) if bias.any() else None
        parts.append(PackPart(tokens, slots.to(device), reads.to(device), added, turned))
    return OpenPacks(heads, tuple(parts), is_open.to(device), is_whole, tuple(kinds.tolist()))  # type: ignore[arg-type]


def _sums_before(lengths: Any) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums[:-1]


def _token_parts(rows: Sequence[Sequence[Reading]]) -> list[slice]:
    """Return the tokens in parts: neighbours for which each row reads only a few packs, and some row reads one."""
    bounds = sorted({bound for row in rows for each in row for bound in (each.start, each.stop)})
    at = [0] * len(rows)
    parts: list[slice] = []
    union: list[set[tuple[PackKey, int]]] = []
    for start, stop in itertools.pairwise(bounds):
        read: list[set[tuple[PackKey, int]]] = []
        for number, row in enumerate(rows):
            while at[number] < len(row) and row[at[number]].stop <= start:
                at[number] += 1
            reading = row[at[number]] if at[number] < len(row) else None
            is_read = reading is not None and reading.start <= start
            read.append({(reading.pack, reading.place)} if reading is not None and is_read else set())
        if not any(read):
            continue
        both = [before | now for before, now in zip(union, read, strict=True)] if union else read
        if parts and parts[-1].stop == start and max(map(len, both)) <= _PACKS_AT_ONCE:
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
    """Return the slots that any of some tokens read, and by how many positions each slot's key is moved so that it ends at its place.

    Returns:
        Slots `[B, S']`, moves `[B, S']`, whether each token reads a slot, and the number added to its score, `[B, T', S']` both.
    """
    slots: list[list[int]] = []
    moves: list[list[int]] = []
    reads: list[list[tuple[slice, slice, float]]] = []
    for row in rows:
        within = [each for each in row if each.start < tokens.stop and each.stop > tokens.start]
        columns: dict[tuple[PackKey, int], slice] = {}
        slots.append([])
        moves.append([])
        for key, place in dict.fromkeys((each.pack, each.place) for each in within):
            pack, first = packs[key], firsts[key]
            length = pack.heads[0][0].shape[1]
            columns[key, place] = slice(len(slots[-1]), len(slots[-1]) + length)
            slots[-1] += range(first, first + length)
            moves[-1] += [place - length - pack.first] * length
        reads.append(
            [
                (
                    slice(max(each.start, tokens.start) - tokens.start, min(each.stop, tokens.stop) - tokens.start),
                    columns[each.pack, each.place],
                    options.chat_score_bias if each.pack.in_chat else options.score_bias,
                )
                for each in within
            ]
        )
    most = max(map(len, slots))
    mask = torch.zeros(len(rows), tokens.stop - tokens.start, most, dtype=torch.bool)
    bias = torch.zeros(mask.shape)
    for number, of_row in enumerate(reads):
        for read_by, columns_read, added in of_row:
            mask[number, read_by, columns_read] = True
            bias[number, read_by, columns_read] = added
    filled = [torch.tensor([each + [0] * (most - len(each)) for each in both]) for both in (slots, moves)]
    return filled[0], filled[1], mask, bias
