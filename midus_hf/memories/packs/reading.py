"""Keys and values of entries, computed by passes over texts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import Rotation
from midus_hf.memories.packs.glossary import LoadedGlossary
from midus_hf.memories.packs.opening import PackKey
from midus_hf.memories.packs.options import PacksOptions

RECORDING = "pack_recording"

_TEXTS_PER_PASS = 64
# A power of two: the angle of this position gives that of one position precisely, for any dtype of cosines and sines.
_LATEST_POSITION = 4096
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
