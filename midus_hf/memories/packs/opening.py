"""The service that tells which packs each token of a pass reads, and fetches them from the bank beside the checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.beside import folder_of_checkpoint, upload_leaves_bank
from midus_hf.memories.hosting.heads import moved_by
from midus_hf.memories.hosting.inputs import arguments_of_pass
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.hosting.services import States, Tokens
from midus_hf.memories.hosting.state import SPARE_TOKENS, MemoryState
from midus_hf.memories.hosting.token_places import TokenPlaces
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.bank import PackBank
from midus_hf.memories.packs.names import Openings
from midus_hf.memories.packs.options import pack_layouts

# Tokens of a pass whose packs are read at once: each reads among the packs that any of them has open.
_TOKENS_AT_ONCE = 128
_NO_TOKEN = -1


class PackPart(NamedTuple):
    """Packs that some tokens of a pass read.

    Args:
        tokens: The T' tokens.
        slots: `[B, S']`, which of the S slots of a row they read; None for all.
        reads: `[B, T', S']`, bool, whether a token reads a slot.
        angles: `[G, B, S', r]`, angles in radians by which keys are moved to their place, for each kind of rotation; None for keys
            that stand there.
    """

    tokens: slice
    slots: torch.Tensor | None
    reads: torch.Tensor
    angles: torch.Tensor | None


class OpenPacks(NamedTuple):
    """Packs that the tokens of a pass read.

    Args:
        heads: `[L, 2, B, K, S, d]`, keys and values of all packs that a row opens, side by side.
        parts: The tokens, part by part.
        is_open: `[B, T]`, bool, whether a token reads any.
        is_whole: Whether every token reads all slots of its row.
        kinds: The kind of rotation of each layer with packs.
    """

    heads: torch.Tensor
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
            slots = part.slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[-1])
            keys, values = keys.gather(2, slots), values.gather(2, slots)
        if part.angles is not None:
            keys = moved_by(attention, keys, part.angles[self.kinds[layer]])
        return keys, values

    def in_place(self, attentions: Sequence[Any]) -> "OpenPacks":
        """Return packs of one part whose keys stand at their places, for many passes."""
        (part,) = self.parts
        heads = [torch.stack(self.of(layer, part, attention)) for layer, attention in enumerate(attentions)]
        return self._replace(heads=torch.stack(heads), parts=(part._replace(slots=None, angles=None),))

    def to(self, device: Any, non_blocking: bool = False) -> "OpenPacks":
        """Return the packs on another device."""

        def moved(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        parts = tuple(PackPart(part.tokens, *map(moved, part[1:])) for part in self.parts)
        return self._replace(heads=moved(self.heads), parts=parts, is_open=moved(self.is_open))


class OpensPacks(States):
    """Packs that the tokens of a pass read, as `packs`, an `OpenPacks`; where no token reads one, the memory is passed by.

    The open names of a sequence are a state in the cache, kept once per model, for the first layer that has the memory.
    """

    key = "packs"
    is_required = True

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        first = {name: min(layer for other, layer in hosted if other == name) for name, _ in hosted}
        super().__init__(model, memories, {(name, layer): hosted[name, layer] for name, layer in first.items()})
        self.tokens = Tokens(model, memories, hosted)
        self.layouts = pack_layouts(memories)
        self.options = {name: hosted[name, first[name]].options for name in first}
        self.banks: dict[str, PackBank] = {}
        # The packs of the latest step by what its rows had open, which a generation reads again for each token.
        self._latest: dict[str, tuple[Any, OpenPacks]] = {}

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> Any:
        """Return the packs that tokens read, by the name of the memory; nothing for one of which no token reads any."""
        if not self.banks:
            return {}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        places = self.tokens.of_pass(model, arguments, own)
        states = super().of_pass(model, arguments, own)
        positions, cache = arguments["position_ids"], arguments[CACHE]
        if positions is None:
            first = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(first, first + ids.shape[1])
        elif positions.dim() == 3:  # along the axes of images, which are one at text
            positions = positions[0]
        return self._open(model, ids, positions.expand(ids.shape), places, states)

    @torch.compiler.disable
    def _open(
        self,
        model: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        places: TokenPlaces,
        states: Mapping[tuple[str, int], MemoryState],
    ) -> dict[str, OpenPacks]:
        read = ids.detach().to("cpu", torch.int64)
        if places.real is not None:
            read = torch.where(places.real.cpu(), read, _NO_TOKEN)
        document = None if places.starts is None else places.starts.cpu().long().cumsum(1)
        where, by_name = positions.cpu(), {name: states.get((name, layer)) for name, layer in self.stateful}
        opened = {
            name: self._opened(name, read, where, document, state)
            for name, state in by_name.items()
            if name in self.banks
        }
        with torch.inference_mode(False), torch.no_grad():
            return {
                name: self._fetched(name, openings, model, ids.device)
                for name, openings in opened.items()
                if openings.any()
            }

    def _opened(
        self,
        name: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        document: torch.Tensor | None,
        state: MemoryState | None,
    ) -> torch.Tensor:
        """Return the openings whose packs each token reads, `[B, T, most]`, and keep what the next pass needs."""
        names, most = self.banks[name].names, self.options[name].open
        kept = {key: tensor.cpu() for key, tensor in (state.kept if state is not None else {}).items()}
        before = max(names.longest - 1, 0)
        earlier = kept["ids"][:, -before:] if kept and before else ids.new_full((len(ids), before), _NO_TOKEN)
        whole = torch.cat([earlier, ids], 1)
        of_whole = None if document is None else F.pad(document, (before, 0))
        found = names.entries(whole, of_whole)[:, before:]
        openings = Openings(len(self.banks[name]))
        opened = openings.of_tokens(found, positions, most, kept["open"][:, -1] if kept else None, document)
        if state is not None:
            count, length = before + SPARE_TOKENS, SPARE_TOKENS + 1
            ids_before = kept["ids"] if kept else ids.new_full((len(ids), count), _NO_TOKEN)
            open_before = kept["open"] if kept else opened.new_zeros(len(ids), length, most)
            spare = kept["spare"] if kept else ids.new_full((len(ids),), SPARE_TOKENS)
            last = ids if document is None else torch.where(document == document[:, -1:], ids, _NO_TOKEN)
            state.keep(
                {
                    "ids": torch.cat([ids_before, last], 1)[:, -count:],
                    "open": torch.cat([open_before, opened], 1)[:, -length:],
                    "spare": (spare + ids.shape[1]).clamp(max=SPARE_TOKENS),
                }
            )
        return opened

    def _fetched(self, name: str, opened: torch.Tensor, model: Any, device: torch.device) -> OpenPacks:
        bank, is_step, dtype = self.banks[name], opened.shape[1] == 1, model.dtype
        key = (tuple(map(tuple, opened[:, 0].tolist())), device, dtype) if is_step else None
        latest = self._latest.get(name)  # read once, since another thread may replace it
        if is_step and latest is not None and latest[0] == key:
            return latest[1]
        openings = Openings(len(bank))
        heads, firsts = self._stacked(bank, openings.entry(opened), device, dtype)
        parts, is_whole = [], True
        for first in range(0, opened.shape[1], _TOKENS_AT_ONCE):
            tokens = slice(first, min(first + _TOKENS_AT_ONCE, opened.shape[1]))
            part = opened[:, tokens]
            if not part.any():
                continue
            slots, owners = _slots(bank, openings, part, firsts)
            reads = (owners[:, None, :, None] == part[:, :, None]).any(-1) & (owners > 0)[:, None]  # [B, T', S']
            is_whole = is_whole and bool(reads.all())
            moves = openings.position(owners) - self.options[name].distance
            # In float64, since positions are large and angles are counted by whole turns.
            angles = (moves[:, :, None].double() * bank.angles[:, None, None]) % (2 * torch.pi)  # [G, B, S', r]
            angles = angles.to(device, torch.promote_types(dtype, torch.float32))
            parts.append(PackPart(tokens, slots.to(device), reads.to(device), angles))
        packs = OpenPacks(heads, tuple(parts), (opened > 0).any(-1).to(device), is_whole, bank.kinds)
        if is_step:
            packs = packs.in_place([model.layers[layer].mixer_part for layer in bank.layout.layers])
            self._latest[name] = key, packs
        return packs

    def _stacked(
        self, bank: PackBank, entries: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[dict[int, int]]]:
        """Return the packs of each row side by side, `[L, 2, B, K, S, d]`, and the first slot of each entry of a row."""
        rows = [[entry for entry in row.unique().tolist() if entry] for row in entries]
        slots = max(sum(map(bank.num_tokens, row)) for row in rows)
        layers, both, kv_heads, width = bank.layout.token_shape
        heads = torch.zeros(layers, both, len(rows), kv_heads, slots, width, dtype=dtype, device=device)
        firsts: list[dict[int, int]] = []
        for number, row in enumerate(rows):
            firsts.append({})
            behind = 0
            for entry in row:
                pack = bank.pack(entry)  # [m, L, 2, K, d]
                firsts[-1][entry], behind = behind, behind + len(pack)
                into = heads[:, :, number, :, firsts[-1][entry] : behind]
                into.copy_(pack.to(device, dtype).permute(1, 2, 3, 0, 4))
        return heads, firsts

    @staticmethod
    def given(value: Any, name: str, layer: int) -> dict[str, Any]:
        """Return the packs that tokens read."""
        return {"packs": value[name]}

    def prepare_inputs(self, inputs: dict[str, Any], attention_mask: Any) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        self.tokens.prepare_inputs(inputs, attention_mask)

    def after_loading(self, name: Any, arguments: Mapping[str, Any]) -> None:
        """Open the banks that lie beside the checkpoint.

        Raises:
            BankError: If a bank is absent, or belongs to another model.
        """
        if name is None:  # made of a state that was passed
            return
        folder = folder_of_checkpoint(name, arguments)
        if folder is None:
            raise BankError(
                f"the bank of packs of {name} is not at hand, without which no name would be known; expected a folder, or a "
                "repository that can be read. Download it while the Hub can be reached."
            )
        self.banks = {each: PackBank(Path(folder, BANKS_FOLDER, each), its) for each, its in self.layouts.items()}
        self._latest.clear()

    def names_of(self, ids: torch.Tensor) -> list[str]:
        """Return the first name of each entry that a text names, in the order of the text; `[T]`, int64, are its token ids."""
        named: dict[str, None] = {}
        for bank in self.banks.values():
            entries, titles = bank.names.entries(ids[None])[0], bank.titles()
            named |= {titles[entry - 1][0]: None for entry in entries.tolist() if entry}
        return list(named)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer by which names are other tokens than those that open banks know."""
        for bank in self.banks.values():
            bank.check_tokenizer(tokenizer)

    def after_saving(self, folder: Any) -> None:
        """Write open banks beside the weights."""
        for name, bank in self.banks.items():
            bank.copy_to(Path(folder, BANKS_FOLDER, name))

    def check_upload(self) -> None:
        """Refuse an upload while a bank is open: Transformers leaves nested folders out."""
        if self.banks:
            raise upload_leaves_bank()


def _slots(
    bank: PackBank, openings: Openings, opened: torch.Tensor, firsts: Sequence[Mapping[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that any of some tokens read, and the opening of each, both `[B, S']`; an opening of 0 fills short rows up."""
    rows = []
    for row, first in zip(opened, firsts, strict=True):
        spans = [(each, openings.entry(each)) for each in row.unique().tolist() if each]
        slots = [slot for _, entry in spans for slot in range(first[entry], first[entry] + bank.num_tokens(entry))]
        rows.append((slots, [each for each, entry in spans for _ in range(bank.num_tokens(entry))]))
    most = max(len(slots) for slots, _ in rows)
    filled = [[each + [0] * (most - len(each)) for each in both] for both in zip(*rows, strict=True)]
    return torch.tensor(filled[0]), torch.tensor(filled[1])
