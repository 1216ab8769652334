"""Packs of a model: texts that are read, kept for sequences, and moved to where tokens read them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.service import Hosted, HostStack
from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.opening import PackKey, Reading
from midus_hf.memories.packs.placing import OpenPacks, open_packs
from midus_hf.memories.packs.reading import RECORDING, Pack, PackReader

# Maximum number of bytes of packs that are kept with a cache, if a pass reads no more: those that were read last.
_MAX_KEPT_BYTES = 1 << 30


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
        num_bytes = 0
        for key, pack in reversed([*self._packs.items()]):
            num_bytes += sum(part.nbytes for both in pack.heads for part in both)
            if num_bytes > _MAX_KEPT_BYTES and key not in packs:
                del self._packs[key]
        return packs


class PackStore:
    """Packs of a model: texts that passes of its stack read, kept for sequences, at the places where tokens read them.

    A pack is right for the entries and the weights of which it was read. A sequence keeps its packs, like its keys and values: a
    changed entry counts from the next name on, and changed weights from the next sequence on.
    """

    #: Readings that outlive sequences, within a context (`midus_hf.memories.packs.kept_readings`). Default: None.
    readings: Any = None

    def __init__(self, model: HostStack, hosted: Hosted):
        self.name = next(name for name, _ in hosted)
        self.layers = sorted(layer for _, layer in hosted)
        self.options: Any = hosted[self.name, self.layers[0]].options
        self._reader = PackReader(self.options)
        model.memory_input_names |= {RECORDING}

    def open(
        self,
        model: HostStack,
        run: Any,
        glossary: Glossary,
        rows: Sequence[Sequence[Reading]],
        ids: torch.Tensor,
        kept: KeptPacks,
    ) -> OpenPacks | None:
        """Return the packs that tokens read; None if their entries were removed since they were found.

        Args:
            model: The stack.
            run: Runs a pass of the stack over texts.
            glossary: The entries.
            rows: What the tokens of each row read; some do.
            ids: The tokens, `[B, T]`.
            kept: What is kept for their sequences.
        """
        num_tokens, device = ids.shape[1], ids.device
        key = tuple(map(tuple, rows)), device, model.dtype
        if num_tokens == 1 and kept.step is not None and kept.step[0] == key:
            return kept.step[1]

        def read(keys: Sequence[PackKey]) -> dict[PackKey, Pack]:
            _refuse_shards(model)
            texts = self._reader.texts(glossary, keys)
            if self.readings is not None and self.readings.is_open:
                return self.readings.read(model, run, self._reader, texts, device)
            return self._reader.read(run, texts, device)

        packs = kept.take(dict.fromkeys(each.pack for row in rows for each in row), read)
        if not packs:
            return None
        angles = self._reader.angles(run, model.dtype, device)
        opened = open_packs(rows, num_tokens, packs, angles, self.options, device, model.dtype)
        if num_tokens == 1:
            heads = opened.by_layer(opened.parts[0], [model.layers[layer].mixer_part for layer in self.layers])
            opened = opened._replace(heads=heads, parts=(opened.parts[0]._replace(slots=None, angles=None),))
            kept.step = key, opened
        return opened


def _refuse_shards(model: HostStack) -> None:
    """Refuse sharded parameters: processes would wait for one another in the pass over an entry's text."""
    for name, parameter in model.named_parameters():
        is_flat = hasattr(parameter, "ds_id") or hasattr(parameter, "_is_flat_param")
        if is_flat or type(parameter).__name__ == "DTensor":
            raise RequestError(
                f"the parameter {name} is sharded, but processes read different texts; expected unsharded parameters (DDP, ZeRO up "
                "to stage 2). Or train without packs, and add them afterwards."
            )
