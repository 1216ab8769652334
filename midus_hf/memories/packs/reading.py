"""Keys and values of entries, computed by passes over texts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import Rotation
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.opening import PackKey
from midus_hf.memories.packs.options import PacksOptions

RECORDING = "pack_recording"

_TEXTS_PER_PASS = 64
# A power of two: the angle of this position gives that of one position precisely, for any dtype of cosines and sines.
_LATEST_POSITION = 4096
_SEPARATOR = "\n"

# Of a layer, for reading `[B, K, T, d]`, and in a pack `[K, m, d]`.
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Pack(NamedTuple):
    """Keys and values of a text per layer with packs, `[K, m, d]`, rotated to positions from `first` on."""

    heads: tuple[KeysAndValues, ...]
    first: int


class TextIds(NamedTuple):
    """Ids that are read for a pack, in this order."""

    prefix: tuple[int, ...]  # before the texts, such as those of a chat; read, and not part of the pack
    text: tuple[int, ...]  # of the entries
    words: tuple[int, ...]  # of the user's turn before the name


class Recording:
    """Keys and values that attention reads in a pass, by the layer's number among those with packs."""

    def __init__(self) -> None:
        self.heads: dict[int, KeysAndValues] = {}
        self.rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        self.rotations[layer] = rotation

    def in_order(self) -> list[KeysAndValues]:
        """Return keys and values by layer."""
        return [heads for _, heads in sorted(self.heads.items())]


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
            rotations = record_pass(run, torch.zeros_like(positions), positions).rotations
            found = []
            for layer in sorted(rotations):
                cos, sin = (part[0].double().cpu() for part in rotations[layer])  # [T, r]
                angle = torch.atan2(sin[0], cos[0])
                for at in range(1, len(cos)):
                    within = torch.atan2(sin[at], cos[at])
                    whole = ((angle * 2**at - within) / (2 * torch.pi)).round()
                    angle = (within + 2 * torch.pi * whole) / 2**at
                found.append(angle)
            self._angles = dtype, torch.stack(found)
        return self._angles[1]

    def texts(self, glossary: Glossary, keys: Sequence[PackKey]) -> dict[PackKey, TextIds]:
        """Return what is read for packs, without entries that were removed, and without packs that have none left.

        The first token of a pass is an attention sink (arXiv 2309.17453). A second one would take attention from both; so texts are
        read after tokens that are not part of their packs, as in APE (arXiv 2502.05431).
        """
        numbers = dict.fromkeys(number for key in keys for number in key.entries)
        texts = glossary.tokens_of(numbers, self._options.max_tokens)
        (separator,) = glossary.spelling.ids_of([_SEPARATOR], special_tokens=False)
        read: dict[PackKey, TextIds] = {}
        for key in keys:
            parts = [texts[number] for number in key.entries if number in texts]
            if parts:
                text = [token for part in parts for token in (*separator, *part)][len(separator) :]
                words = (*separator, *key.words) if key.words else ()
                read[key] = TextIds(tuple(glossary.token_prefix(key.in_chat)), tuple(text), words)
        return read

    def read(self, run: Any, texts: Mapping[PackKey, TextIds], device: Any) -> dict[PackKey, Pack]:
        """Return packs of texts, read in passes over many of them."""
        packs: dict[PackKey, Pack] = {}
        for in_chat in {key.in_chat for key in texts}:
            chosen = [key for key in texts if key.in_chat == in_chat]
            for first in range(0, len(chosen), _TEXTS_PER_PASS):
                part = {key: texts[key] for key in chosen[first : first + _TEXTS_PER_PASS]}
                rows = [[*each.prefix, *each.text, *each.words] for each in part.values()]
                tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
                for row, each in enumerate(rows):
                    tokens[row, : len(each)] = torch.tensor(each)
                positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
                heads = record_pass(run, tokens.to(device), positions)
                for row, (key, ids) in enumerate(part.items()):
                    text = slice(len(ids.prefix), len(rows[row]))
                    pack = tuple((keys_[row, :, text], values[row, :, text]) for keys_, values in heads.in_order())
                    packs[key] = Pack(pack, len(ids.prefix))
        return packs


def record_pass(run: Any, ids: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None) -> Recording:
    """Run a pass over texts, `[B, T]`, after those of a cache, if any; return what attention read."""
    recording = Recording()
    run(
        input_ids=ids,
        position_ids=positions,
        use_cache=cache is not None,
        **{RECORDING: recording, CACHE: cache},
    )
    return recording
