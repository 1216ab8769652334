"""The service that tells which packs each token of a pass reads, and fetches them from the bank beside the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.beside import folder_of_checkpoint, upload_leaves_bank
from midus_hf.memories.hosting.inputs import arguments_of_pass
from midus_hf.memories.hosting.services import States, Tokens
from midus_hf.memories.hosting.state import SPARE_TOKENS, MemoryState
from midus_hf.memories.hosting.token_places import TokenPlaces
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.bank import PackBank
from midus_hf.memories.packs.names import open_entries
from midus_hf.memories.packs.options import pack_layouts

# Tokens of a pass whose packs are read at once: each reads among the packs that any of them has open.
_TOKENS_AT_ONCE = 128
_NO_TOKEN = -1


class PackPart(NamedTuple):
    """Packs that some tokens of a pass read: the tokens, the slots `[B, S']` among the S of the row, and which `[B, T', S']`."""

    tokens: slice
    slots: torch.Tensor | None
    reads: torch.Tensor


class OpenPacks(NamedTuple):
    """Packs that the tokens of a pass read.

    Args:
        heads: `[L, 2, B, K, S, d]`, keys and values of all packs that a row opens, side by side.
        parts: The tokens, part by part, with the slots that they read.
        is_open: `[B, T]`, bool, whether a token reads any.
        is_whole: Whether every token reads all slots of its row.
    """

    heads: torch.Tensor
    parts: tuple[PackPart, ...]
    is_open: torch.Tensor
    is_whole: bool

    def of(self, layer: int, part: PackPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for the tokens of a part, each `[B, K, S', d]`, of a layer by its number among those with packs."""
        keys, values = self.heads[layer]
        if part.slots is None:
            return keys, values
        slots = part.slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[-1])
        return keys.gather(2, slots), values.gather(2, slots)

    def to(self, device: Any, non_blocking: bool = False) -> "OpenPacks":
        """Return the packs on another device."""

        def moved(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        parts = tuple(PackPart(part.tokens, moved(part.slots), moved(part.reads)) for part in self.parts)
        return OpenPacks(moved(self.heads), parts, moved(self.is_open), self.is_whole)


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
        self.most = {name: hosted[name, first[name]].options.open for name in first}
        self.banks: dict[str, PackBank] = {}
        # The packs of the latest pass by the entries of its rows, which a generation reads again for each token.
        self._latest: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> Any:
        """Return the packs that tokens read, by the name of the memory; nothing for one of which no token reads any."""
        if not self.banks:
            return {}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        places = self.tokens.of_pass(model, arguments, own)
        states = super().of_pass(model, arguments, own)
        return self._open(ids, places, states, model.dtype)

    @torch.compiler.disable
    def _open(
        self,
        ids: torch.Tensor,
        places: TokenPlaces,
        states: Mapping[tuple[str, int], MemoryState],
        dtype: torch.dtype,
    ) -> dict[str, OpenPacks]:
        read = ids.detach().to("cpu", torch.int64)
        if places.real is not None:
            read = torch.where(places.real.cpu(), read, _NO_TOKEN)
        document = None if places.starts is None else places.starts.cpu().long().cumsum(1)
        by_name = {name: states.get((name, layer)) for name, layer in self.stateful}
        opened = {
            name: self._opened(name, read, document, state) for name, state in by_name.items() if name in self.banks
        }
        with torch.inference_mode(False), torch.no_grad():
            return {
                name: self._fetched(name, entries, ids.device, dtype)
                for name, entries in opened.items()
                if entries.any()
            }

    def _opened(
        self, name: str, ids: torch.Tensor, document: torch.Tensor | None, state: MemoryState | None
    ) -> torch.Tensor:
        """Return the entries that each token reads, `[B, T, most]`, and keep what the next pass needs."""
        names, most = self.banks[name].names, self.most[name]
        kept = {key: tensor.cpu() for key, tensor in (state.kept if state is not None else {}).items()}
        before = max(names.longest - 1, 0)
        earlier = kept["ids"][:, -before:] if kept and before else ids.new_full((len(ids), before), _NO_TOKEN)
        whole = torch.cat([earlier, ids], 1)
        of_whole = None if document is None else F.pad(document, (before, 0))
        found = names.entries(whole, of_whole)[:, before:]
        opened = open_entries(found, most, kept["open"][:, -1] if kept else None, document)
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

    def _fetched(self, name: str, opened: torch.Tensor, device: torch.device, dtype: torch.dtype) -> OpenPacks:
        rows = tuple(tuple(entry for entry in row.unique().tolist() if entry) for row in opened)
        key = (rows, device, dtype)
        if name not in self._latest or self._latest[name][0] != key:
            self._latest[name] = key, *self._stacked(self.banks[name], rows, device, dtype)
        _, heads, owners = self._latest[name]
        parts, is_whole = [], True
        for first in range(0, opened.shape[1], _TOKENS_AT_ONCE):
            tokens = slice(first, min(first + _TOKENS_AT_ONCE, opened.shape[1]))
            part, slots, of_slots = opened[:, tokens], None, owners
            if len(opened[0]) > _TOKENS_AT_ONCE:
                used = (owners[:, :, None] == part.flatten(1)[:, None]).any(-1) & (owners > 0)  # [B, S]
                most = int(used.sum(1).max())
                if not most:
                    continue
                slots = used.int().argsort(dim=1, descending=True, stable=True)[:, :most]
                of_slots = owners.gather(1, slots)
            reads = (of_slots[:, None, :, None] == part[:, :, None]).any(-1) & (of_slots > 0)[:, None]  # [B, T', S']
            is_whole = is_whole and slots is None and bool(reads.all())
            parts.append(PackPart(tokens, slots if slots is None else slots.to(device), reads.to(device)))
        return OpenPacks(heads, tuple(parts), (opened > 0).any(-1).to(device), is_whole)

    def _stacked(
        self, bank: PackBank, rows: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packs of each row side by side, `[L, 2, B, K, S, d]`, and the entry of each slot, `[B, S]`, 0 for none."""
        slots = max(sum(map(bank.num_tokens, row)) for row in rows)
        layers, both, kv_heads, width = bank.layout.token_shape
        heads = torch.zeros(layers, both, len(rows), kv_heads, slots, width, dtype=dtype, device=device)
        owners = torch.zeros(len(rows), slots, dtype=torch.int64)
        for number, row in enumerate(rows):
            first = 0
            for entry in row:
                pack = bank.pack(entry)  # [m, L, 2, K, d]
                behind = first + len(pack)
                heads[:, :, number, :, first:behind] = pack.to(device, dtype).permute(1, 2, 3, 0, 4)
                owners[number, first:behind] = entry
                first = behind
        return heads, owners

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

    def after_saving(self, folder: Any) -> None:
        """Write open banks beside the weights."""
        for name, bank in self.banks.items():
            bank.copy_to(Path(folder, BANKS_FOLDER, name))

    def check_upload(self) -> None:
        """Refuse an upload while a bank is open: Transformers leaves nested folders out."""
        if self.banks:
            raise upload_leaves_bank()
