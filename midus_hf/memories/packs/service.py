"""The service that finds names in the tokens of a pass, and reads the texts of the entries that the names open."""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.parts import CACHE, Keywords, TokenPlaces, arguments_of_pass
from midus_hf.memories.hosting.service import BankService, HostStack, States, Tokens
from midus_hf.memories.hosting.state import SPARE_TOKENS, MemoryState
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.glossary import Glossary, read_glossary, write_glossary
from midus_hf.memories.packs.opening import (
    OpenNames,
    PackKey,
    Reading,
    kept_openings,
    readings_of,
    state_of,
    state_shape,
    states_tensor,
)
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.reading import OpenPacks, Pack, Recording, open_packs, read_texts, rotation_angles

_NO_TOKEN = -1
# Largest number of tokens of packs that are kept with a cache, if a pass reads no more: those that were read last.
_MAX_KEPT_TOKENS = 1 << 15
# What is read between the texts of entries that are read as one, and before the words of a turn.
_SEPARATOR = "\n"
# Argument of a pass in which the keys and values of texts are recorded.
RECORDING = "pack_recording"


class CarriedRows:
    """What was read of a batch of sequences, to go on from there. It is empty in a copy or a pickle, as after any change of rows.

    Args:
        rows: The rows. Default: none.
        changes: Number of changes of the state in the cache when they were read.
    """

    def __init__(self, rows: Sequence[OpenNames] = (), changes: int = -1):
        self._rows, self._changes = rows, changes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return CarriedRows, ()

    def rows(self, glossary: Glossary, state: MemoryState) -> Sequence[OpenNames]:
        """Return the rows, if they are those of the state and the names that the glossary has now; else none."""
        is_now = self._changes == state.changes and all(row.scan.table is glossary.table for row in self._rows)
        return self._rows if is_now else ()


class OpensPacks(BankService, States):
    """Packs that the tokens of a pass read, as `packs`, an `OpenPacks`; where no token reads one, the memory has nothing to do.

    A state in the cache keeps the openings of each sequence, once per model, for the first layer that has the memory, and with them
    the packs that were made for them: like the keys and values of the cache, they were computed by the weights that read the tokens.
    A pass without a cache computes the packs that it reads.
    """

    key = "packs"
    is_required = True
    runs_passes = True
    files = (GLOSSARY_FILE, "*.json", "*.model", "*.txt", "*.jinja")

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        names = {name for name, _ in hosted}
        if len(names) > 1:
            raise RequestError(
                f"the memories {', '.join(map(repr, sorted(names)))} are packs; expected one, whose glossary has all entries. Add "
                "entries with midus edit add."
            )
        self.layers = sorted(layer for _, layer in hosted)
        self.name = names.pop()
        first = self.name, self.layers[0]
        BankService.__init__(self, model, memories, hosted)
        States.__init__(self, model, memories, {first: hosted[first]})
        self.tokens, self.options = Tokens(model, memories, hosted), hosted[first].options
        model.memory_input_names |= {RECORDING}
        self.glossary: Glossary | None = None
        self._vocab_size, self._recorded = model.config.vocab_size, getattr(model.config, "upscale", None)
        # With the dtype of the model, to which cosines, sines and what they are made of are rounded.
        self._angles: tuple[torch.dtype, torch.Tensor] | None = None
        parameter = next(model.parameters())
        if parameter.device.type != "meta" and not hasattr(parameter, "ds_id"):  # as in from_pretrained
            _warn_without_folder()

    def digest(self) -> str | None:
        """Return a digest of the entries; None without a glossary."""
        if self.glossary is None:
            return None
        digest = hashlib.sha256()
        for entry in self.glossary:
            digest.update(repr(entry).encode())
        return digest.hexdigest()

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Any:
        """Return the packs that tokens read, by the name of the memory; nothing if no token reads any."""
        if own.get(RECORDING) is not None:
            return {self.name: own[RECORDING]}
        is_skipped = all(self.name not in model.layers[layer].sites for layer in self.layers)
        if self.glossary is None or is_skipped:
            return {}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        places = self.tokens.prepare_pass(model, arguments, own)
        state = next(iter(super().prepare_pass(model, arguments, own).values()), None)
        positions, cache = arguments["position_ids"], arguments[CACHE]
        if positions is None:
            first = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(first, first + ids.shape[1])
        elif positions.dim() == 3:  # along the axes of images, which are one at text
            positions = positions[0]
        return self._open(model, self.glossary, ids, positions.expand(ids.shape), places, state)

    @torch.compiler.disable
    def _open(
        self,
        model: HostStack,
        glossary: Glossary,
        ids: torch.Tensor,
        positions: torch.Tensor,
        places: TokenPlaces,
        state: MemoryState | None,
    ) -> dict[str, OpenPacks]:
        tokens = ids.detach().to("cpu", torch.int64)
        if places.real is not None:
            tokens = torch.where(places.real.cpu(), tokens, _NO_TOKEN)
        begins = None if places.starts is None else places.starts.cpu().tolist()
        rows = self._readings(glossary, tokens, positions.tolist(), begins, state)
        if not any(rows):
            return {}
        kept: dict[str, Any] = {} if state is None else state.shared
        key = tuple(tuple(row) for row in rows), ids.device, model.dtype
        if ids.shape[1] == 1 and kept.get("step", (None,))[0] == key:
            return {self.name: kept["step"][1]}
        with torch.inference_mode(False), torch.no_grad():
            packs = self._packs(model, glossary, rows, kept, ids.device)
            if not packs:  # their entries were removed since the names were found
                return {}
            assert self._angles is not None, "packs were read before"
            angles = self._angles[1]
            opened = open_packs(rows, ids.shape[1], packs, angles, self.options, ids.device, model.dtype)
            if ids.shape[1] == 1:
                opened = opened.in_place([model.layers[layer].mixer_part for layer in self.layers])
                kept["step"] = key, opened
        return {self.name: opened}

    def _readings(
        self,
        glossary: Glossary,
        tokens: torch.Tensor,
        positions: list[list[int]],
        begins: list[list[bool]] | None,
        state: MemoryState | None,
    ) -> list[list[Reading]]:
        """Return what the tokens of each row read, and keep what the next pass needs."""
        kept = {key: tensor.cpu() for key, tensor in (state.kept if state is not None else {}).items()}
        size = kept_openings(self.options)
        carried = () if state is None or not kept else state.shared.pop("rows", CarriedRows()).rows(glossary, state)
        rows = carried or [
            _open_names(glossary, self.options, kept, row, positions[row][0]) for row in range(len(tokens))
        ]
        readings, behind = [], []
        for row, (names, ids) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if kept and not carried:
                names.read_before(kept["ids"][row, -glossary.reach :].tolist(), positions[row][0])
            read, states = readings_of(names, ids, positions[row], None if begins is None else begins[row])
            readings.append(read)
            behind.append(states[-SPARE_TOKENS - 1 :])
        if state is not None:
            batch = len(tokens)
            if begins is not None:  # only of the last document
                document = torch.tensor(begins).long().cumsum(1)
                tokens = torch.where(document == document[:, -1:], tokens, _NO_TOKEN)
            opened = states_tensor(behind, size)
            ids_before = kept["ids"] if kept else tokens.new_full((batch, glossary.reach + SPARE_TOKENS), _NO_TOKEN)
            open_before = kept["open"] if kept else opened.new_zeros(batch, SPARE_TOKENS + 1, *state_shape(size))
            spare = kept["spare"] if kept else tokens.new_full((batch,), SPARE_TOKENS)
            state.shared["rows"] = CarriedRows(rows, state.changes)
            state.keep(
                {
                    "ids": torch.cat([ids_before, tokens], 1),
                    "open": torch.cat([open_before, opened], 1)[:, -SPARE_TOKENS - 1 :],
                    "spare": (spare + tokens.shape[1]).clamp(max=SPARE_TOKENS),
                }
            )
        return readings

    def _packs(
        self, model: Any, glossary: Glossary, rows: list[list[Reading]], kept: dict[str, Any], device: torch.device
    ) -> dict[PackKey, Pack]:
        """Return the packs that rows read. Those that the sequences opened before are kept with their cache."""
        wanted = dict.fromkeys(each.pack for row in rows for each in row)
        made = kept.setdefault("packs", {})
        packs = {key: made.pop(key) for key in wanted if key in made}
        new = _pack_ids(glossary, [key for key in wanted if key not in packs], self.options.max_tokens)
        if new:
            _refuse_shards(model)

        def run(ids: torch.Tensor, positions: torch.Tensor, recording: Recording) -> None:
            model(input_ids=ids, position_ids=positions, use_cache=False, **{RECORDING: recording})

        if self._angles is None or self._angles[0] != model.dtype:
            self._angles = model.dtype, rotation_angles(run, device)
        for in_chat in {key.in_chat for key in new}:
            texts = {key: ids for key, ids in new.items() if key.in_chat == in_chat}
            read = read_texts(run, [*texts.values()], glossary.in_front(in_chat), device)
            packs |= zip(texts, read, strict=True)
        made |= packs
        num_tokens = 0
        for key, pack in reversed([*made.items()]):
            num_tokens += pack.heads[0][0].shape[1]
            if num_tokens > _MAX_KEPT_TOKENS and key not in packs:
                del made[key]
        return packs

    def open_at_end(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the entries whose packs the last token of a text reads, and others that the text names."""
        assert self.glossary is not None, "the model has a glossary"
        row = OpenNames(self.glossary, self.options)
        readings_of(row, ids, range(len(ids)), None)
        pack = row.pack()
        at_end = [] if pack is None else [*pack[0].entries]
        return at_end, [entry for entry in self.glossary.named(ids) if entry not in at_end]

    @staticmethod
    def layer_arguments(value: Any, name: str, layer: int) -> Keywords:
        """Return the packs that tokens read."""
        return {"packs": value[name]}

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        self.tokens.prepare_inputs(inputs, attention_mask)

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Open the glossary that lies beside the checkpoint; warn about a model that was made of a state."""
        if name is None:
            _warn_without_folder()
        super().after_loading(name, arguments)

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Read the glossary and the tokenizer, or raise `RequestError` if either is absent, or a row is not an entry."""
        if folder is None:
            raise RequestError(
                "the glossary of this model is not at hand, without which no name would be known; expected a folder, or a repository "
                "that can be read. Download it while the Hub can be reached."
            )
        from transformers import AutoTokenizer

        trusted = arguments.get("trust_remote_code")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
        self.glossary = Glossary(tokenizer, read_glossary(folder), self._vocab_size, self.options.max_tokens)
        self.glossary.recorded, self.glossary.find_open = self._recorded, self.open_at_end
        if self.glossary.chat_remark is not None:
            warnings.warn(self.glossary.chat_remark, stacklevel=2)

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Write the glossary next to the weights, and the tokenizer for finding names, if there is none."""
        if self.glossary is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_glossary(folder, self.glossary)
            if not any(Path(folder).glob("tokenizer*")):
                self.glossary.spelling.tokenizer.save_pretrained(folder)

    def check_upload(self) -> None:
        """Allow an upload, which includes files that were written before."""


def _warn_without_folder() -> None:
    warnings.warn(
        "this model has packs and is made without a folder, so that it has no glossary and computes as if no text had a name; "
        "expected from_pretrained(FOLDER), which reads the glossary beside the weights.",
        stacklevel=2,
    )


def _open_names(
    glossary: Glossary, options: PacksOptions, kept: Mapping[str, torch.Tensor], row: int, position: int
) -> OpenNames:
    """Return the openings of a row before the token at a position, from the state of the rows; none at the beginning."""
    if not kept:
        return OpenNames(glossary, options)
    ids = kept["ids"][row]

    def earlier(first: int, end: int) -> list[int]:
        found: list[int] = ids[max(len(ids) - (position - first), 0) : len(ids) - (position - end)].tolist()
        return found

    return OpenNames(glossary, options, state_of(kept["open"][row, -1]), earlier)


def _pack_ids(glossary: Glossary, keys: Sequence[PackKey], max_tokens: int) -> dict[PackKey, list[int]]:
    """Return the ids that each pack is computed from, without entries that were removed, and packs of which none is left."""
    entries = {
        number: entry for key in keys for number in key.entries if (entry := glossary.entry(number)) is not None
    }
    texts = dict(zip(entries, glossary.texts_of(entries.values(), max_tokens), strict=True)) if entries else {}
    (separator,) = glossary.spelling.ids_of([_SEPARATOR], special_tokens=False)
    found: dict[PackKey, list[int]] = {}
    for key in keys:
        parts = [texts[number] for number in key.entries if number in texts]
        if parts:
            joined = [token for part in parts for token in (*separator, *part)][len(separator) :]
            found[key] = [*joined, *separator, *key.words] if key.words else joined
    return found


def _refuse_shards(model: HostStack) -> None:
    """Refuse sharded parameters, since processes would wait for one another in the pass over an entry's text."""
    for name, parameter in model.named_parameters():
        is_flat = hasattr(parameter, "ds_id") or hasattr(parameter, "_is_flat_param")
        if is_flat or type(parameter).__name__ == "DTensor":
            raise RequestError(
                f"the parameter {name} is shared by several processes, of which each would read the texts that its own rows name; "
                "expected whole parameters (DDP, ZeRO up to stage 2). Or train without packs, and add them afterwards."
            )
