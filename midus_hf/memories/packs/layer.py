"""Packs in a model: what its sequences have open, the service that finds it, and attention to packs."""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from midus_hf.anatomy.record import iter_recorded_options, record_entry
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.memories.hosting.heads import (
    Attention,
    AttentionFunction,
    HeadsOutput,
    SequenceHeads,
    get_attention_host,
    require_log_sum_exp,
)
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.parts import CACHE, Keywords, arguments_of_pass
from midus_hf.memories.hosting.service import BankService, HostStack, States, Tokens
from midus_hf.memories.hosting.sites import InsideAttention
from midus_hf.memories.hosting.state import SPARE_TOKENS, MemoryState, without_last
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.glossary import Glossary, LoadedGlossary, read_glossary, write_glossary
from midus_hf.memories.packs.opening import (
    OpeningTracker,
    PackKey,
    Reading,
    RowState,
    readings_of,
    state_of,
    state_shape,
    states_tensor,
)
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.reading import RECORDING, KeptPacks, OpenPacks, Pack, PackReader, Recording, open_packs
from midus_hf.memories.registry import Memories, register_layer
from midus_hf.ops.moda.op import joint_attention, sequence_scores, shares_of_both

_NO_TOKEN = -1


class CachedRows:
    """Trackers of rows for the next pass: none in a copy or a pickle, nor after a change of the state."""

    def __init__(self, rows: Sequence[OpeningTracker] = (), changes: int = -1):
        self._rows, self._changes = rows, changes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return CachedRows, ()

    def rows(self, glossary: LoadedGlossary, state: MemoryState) -> Sequence[OpeningTracker]:
        """Return the rows, if they are those of the state and the names that the glossary has now; else none."""
        is_now = self._changes == state.changes and all(row.scan.index is glossary.index for row in self._rows)
        return self._rows if is_now else ()


class SequenceOpenings:
    """What the sequences of a batch have open, from pass to pass by a state in their cache, if any.

    The state keeps `numbers`, `[B, S]`, ids of all tokens so far from 1 on (0 for padding, and for earlier documents), and their
    `positions`; `open`, states after the last tokens; and `spare`, as `without_last` takes it.
    """

    def __init__(self, glossary: LoadedGlossary, options: PacksOptions, state: MemoryState | None):
        self._glossary, self._options, self._state = glossary, options, state
        self._kept = {} if state is None else {key: tensor.cpu() for key, tensor in state.kept.items()}

    def read(
        self, tokens: torch.Tensor, positions: Sequence[Sequence[int]], begins: torch.Tensor | None
    ) -> list[list[Reading]]:
        """Return what tokens `[B, T]` (-1: padding) read, and keep the state; `begins`: of documents, bool."""
        rows = self._trackers(positions)
        starts = [None] * len(rows) if begins is None else begins.tolist()
        read = [readings_of(*each) for each in zip(rows, tokens.tolist(), positions, starts, strict=True)]
        if self._state is not None:
            places = torch.tensor(positions).expand(tokens.shape)
            self._keep(rows, tokens, places, begins, [states[-SPARE_TOKENS - 1 :] for _, states in read])
        return [readings for readings, _ in read]

    def _trackers(self, positions: Sequence[Sequence[int]]) -> Sequence[OpeningTracker]:
        """Return the openings of each row before the first token, of the last pass or the state."""
        if not self._kept or self._state is None:
            return [OpeningTracker(self._glossary, self._options) for _ in positions]
        cached = self._state.shared.pop("rows", CachedRows()).rows(self._glossary, self._state)
        if cached:
            return cached
        rows = []
        for numbers, places, opened in zip(
            *(self._kept[key] for key in ("numbers", "positions", "open")), strict=True
        ):
            places, ids = places[numbers > 0], numbers[numbers > 0] - 1  # padding may stand between tokens

            def earlier(first: int, end: int, ids: torch.Tensor = ids, places: torch.Tensor = places) -> list[int]:
                return ids[(places >= first) & (places < end)].tolist()

            row = OpeningTracker(self._glossary, self._options, state_of(opened[-1]), earlier)
            last = slice(max(len(ids) - self._glossary.lookback_tokens, 0), None)
            row.read_before(ids[last].tolist(), places[last].tolist())
            rows.append(row)
        return rows

    def _keep(
        self,
        rows: Sequence[OpeningTracker],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        begins: torch.Tensor | None,
        states: Sequence[Sequence[RowState]],
    ) -> None:
        assert self._state is not None
        batch, num_tokens = tokens.shape
        opened = states_tensor(states, self._options)
        before = self._kept or {
            **dict.fromkeys(("numbers", "positions"), tokens.new_zeros(batch, 0)),
            "open": opened.new_zeros(batch, SPARE_TOKENS + 1, *state_shape(self._options)),
            "spare": tokens.new_full((batch,), SPARE_TOKENS),
        }
        numbers = torch.cat([before["numbers"], tokens - _NO_TOKEN], 1)
        if begins is not None:  # only of the last document
            document = F.pad(begins.long().cumsum(1), (before["numbers"].shape[1], 0))
            numbers = numbers * (document == document[:, -1:])
        self._state.shared["rows"] = CachedRows(rows, self._state.changes)
        self._state.keep(
            {
                "numbers": numbers,
                "positions": torch.cat([before["positions"], positions], 1),
                "open": torch.cat([before["open"], opened], 1)[:, -SPARE_TOKENS - 1 :],
                "spare": (before["spare"] + num_tokens).clamp(max=SPARE_TOKENS),
            }
        )


class PacksService(BankService):
    """Packs that the tokens of a pass read, as `packs`, an `OpenPacks`; not given if no token reads one.

    The first layer with the memory has a state in the cache, for `SequenceOpenings` and `KeptPacks`. A pass without a cache
    computes the packs that it reads.
    """

    key = "packs"
    is_required = True
    may_add_cache = True
    runs_passes = True
    files = (GLOSSARY_FILE, "*.json", "*.model", "*.txt", "*.jinja")

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        names = {name for name, _ in hosted}
        if len(names) > 1:
            raise RequestError(
                f"the memories {', '.join(map(repr, sorted(names)))} are packs; expected one, whose glossary has all entries. Add "
                "entries with midus edit add."
            )
        super().__init__(model, memories, hosted)
        self.layers, (self.name,) = sorted(layer for _, layer in hosted), names
        first = self.name, self.layers[0]
        self.options: Any = hosted[first].options
        self.tokens, self.reader = Tokens(model, memories, hosted), PackReader(self.options)
        # A server keeps states by slots of its cache.
        self.states: Any = States(model, memories, {first: hosted[first]}) if self.may_add_cache else None
        model.memory_input_names |= {RECORDING}
        self.glossary: Glossary | None = None
        self._config = model.config
        parameter = next(model.parameters())
        if parameter.device.type != "meta" and not hasattr(parameter, "ds_id"):  # as in from_pretrained
            _warn_without_folder()

    def digest(self) -> str | None:
        """Return a digest of the entries; None without a glossary."""
        if self.glossary is None:
            return None
        return hashlib.sha256("".join(map(repr, self.glossary)).encode()).hexdigest()

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Any:
        """Return the packs that tokens read, by the name of the memory; nothing if no token reads any."""
        if own.get(RECORDING) is not None:
            return {self.name: own[RECORDING]}
        is_skipped = all(self.name not in model.layers[layer].sites for layer in self.layers)
        if self.glossary is None or is_skipped:
            return {}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        places = self.tokens.prepare_pass(model, arguments, own)
        state = next(iter(self.states.prepare_pass(model, arguments, own).values()), None)
        positions, cache = arguments["position_ids"], arguments[CACHE]
        if positions is None:
            first = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(first, first + ids.shape[1])
        elif positions.dim() == 3:  # along the axes of images, which are one at text
            positions = positions[0]
        opened = self._open(model, ids, positions.expand(ids.shape), places.real, places.starts, state)
        return {} if opened is None else {self.name: opened}

    @torch.compiler.disable
    def _open(
        self,
        model: HostStack,
        ids: torch.Tensor,
        positions: torch.Tensor,
        real: torch.Tensor | None,
        starts: torch.Tensor | None,
        state: MemoryState | None,
    ) -> OpenPacks | None:
        assert self.glossary is not None
        tokens = ids.detach().to("cpu", torch.int64)
        if real is not None:
            tokens = torch.where(real.cpu(), tokens, _NO_TOKEN)
        openings = SequenceOpenings(self.glossary, self.options, state)
        rows = openings.read(tokens, positions.tolist(), None if starts is None else starts.cpu())
        kept = KeptPacks() if state is None else state.shared.setdefault("packs", KeptPacks())
        with torch.inference_mode(False), torch.no_grad():
            return self._packs_of(model, model, rows, ids.shape[1], ids.device, kept) if any(rows) else None

    def _packs_of(
        self,
        model: HostStack,
        run: Any,
        rows: Sequence[Sequence[Reading]],
        num_tokens: int,
        device: torch.device,
        kept: KeptPacks,
    ) -> OpenPacks | None:
        """Return the packs that tokens read; None if their entries were removed since they were found."""
        glossary = self.glossary
        assert glossary is not None
        key = tuple(map(tuple, rows)), device, model.dtype
        if num_tokens == 1 and kept.step is not None and kept.step[0] == key:
            return kept.step[1]

        def read(keys: Sequence[PackKey]) -> dict[PackKey, Pack]:
            _refuse_shards(model)
            return self.reader.read(run, glossary, keys, device)

        packs = kept.take(dict.fromkeys(each.pack for row in rows for each in row), read)
        if not packs:
            return None
        angles = self.reader.angles(run, model.dtype, device)
        opened = open_packs(rows, num_tokens, packs, angles, self.options, device, model.dtype)
        if num_tokens == 1:
            opened = opened.in_place([model.layers[layer].mixer_part for layer in self.layers])
            kept.step = key, opened
        return opened

    @classmethod
    def layer_arguments(cls, value: Any, name: str, layer: int) -> Keywords:
        return {"packs": value[name]}

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        self.tokens.prepare_inputs(inputs, attention_mask)

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching, whose cache has no place for states."""
        self.states.check_continuous_batching(arguments)

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Open the glossary next to the weights; warn about a model without a folder."""
        if name is None:
            _warn_without_folder()
        super().after_loading(name, arguments)

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Read the glossary and the tokenizer, or raise `RequestError` if either is absent or wrong."""
        if folder is None:
            raise RequestError(
                "the glossary of this model is not at hand, without which no name would be known; expected a folder, or a repository "
                "that can be read. Download it while the Hub can be reached."
            )
        from transformers import AutoTokenizer

        trusted = arguments.get("trust_remote_code")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
        self.glossary = Glossary(tokenizer, read_glossary(folder), self._config.vocab_size, self.options)
        self.glossary.recorded = [*iter_recorded_options(record_entry(self._config), "packs")]
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
        "expected from_pretrained(FOLDER), which reads the glossary next to the weights.",
        stacklevel=2,
    )


def _refuse_shards(model: HostStack) -> None:
    """Refuse sharded parameters: processes would wait for one another in the pass over an entry's text."""
    for name, parameter in model.named_parameters():
        is_flat = hasattr(parameter, "ds_id") or hasattr(parameter, "_is_flat_param")
        if is_flat or type(parameter).__name__ == "DTensor":
            raise RequestError(
                f"the parameter {name} is sharded, but processes read different texts; expected unsharded parameters (DDP, ZeRO up "
                "to stage 2). Or train without packs, and add them afterwards."
            )


class PacksSite(InsideAttention):
    """Heads that also read packs. Other memories change their output for the sequence and the packs."""

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.memory = next(entry.name for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        get_attention_host(layer).changes.insert(0, self)

    def attend(
        self, attention_function: AttentionFunction, module: Attention, *heads: Any, **kwargs: object
    ) -> HeadsOutput:
        """Attend to the sequence, and to the packs that tokens of the pass read, if there are any."""
        layer, call = self.layer, self.layer.call
        if not call.memory_inputs.is_complete_for(layer.classes[self.memory], self.memory):
            return attention_function(module, *heads, **kwargs)
        query, key, value, mask = heads
        inputs = layer.inputs_of(self.memory, call.memory_inputs)
        if isinstance(inputs["packs"], Recording):  # also where the layer skips the memory
            inputs["packs"].note(layer.memories[self.memory].index, module, key, value, call.rotation)  # type: ignore[arg-type]
            return attention_function(module, *heads, **kwargs)
        if self.memory not in layer.sites:
            return attention_function(module, *heads, **kwargs)
        implementation = module.config.config._attn_implementation
        sequence = SequenceHeads(module, attention_function, implementation, query, key, value, mask, kwargs)
        return layer.memories[self.memory](sequence=sequence, **inputs)


@register_layer(PacksOptions)
class PacksMemory(MemoryModule):
    """A layer's part of packs, without tensors: reads keys and values of texts whose names are open.

    A pack ends `distance` positions before the last token of its name. Its scores are raised by `score_bias`, in a chat by
    `chat_score_bias`; at 0, a token reads the same as if the pack's text were there.
    """

    sites = (PacksSite,)
    services = (PacksService,)
    options: PacksOptions
    rollback = staticmethod(without_last)

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation that does not return the log-sum-exp of its softmax."""
        require_log_sum_exp(implementation)

    def forward(self, *, sequence: SequenceHeads, packs: OpenPacks) -> HeadsOutput:
        """Attend to the sequence and to the packs of each token, in one softmax.

        Return the output of the heads, `[B, T, H, d]`, bit for bit that of the sequence where a token reads no pack; and attention
        weights to the sequence, if known, which sum to less than 1 where a token reads one.
        """
        if packs.is_whole and sequence.query.shape[2] == 1 and sequence.mask is None:  # a step of a generation
            (part,) = packs.parts
            keys, values = packs.of(self.index, part, sequence.module)
            return sequence.attend_with_extra_keys(keys, values, part.bias)
        output, weights, lse = sequence.with_log_sum()
        sequence_output = output.transpose(1, 2)  # [B, H, T, d]
        pieces, done, shares_of_sequence = [], 0, torch.ones_like(lse)
        # Attention caps scores only in eager mode.
        softcap = sequence.softcap if sequence.implementation != "sdpa" else None
        for part in packs.parts:
            keys, values = packs.of(self.index, part, sequence.module)
            query = sequence.query[:, :, part.tokens]
            scores = sequence_scores(
                query, keys, part.reads.unsqueeze(1), False, sequence.scaling, softcap
            )  # [B, H, T', S]
            if part.bias is not None:
                scores = scores + part.bias[:, None]
            is_empty = ~part.reads.any(-1)[:, None]  # [B, 1, T']
            scores = scores.masked_fill(is_empty.unsqueeze(-1), 0)
            shares = scores.softmax(-1).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, K, G * T', S]
            read = shares @ values.to(shares.dtype)  # [B, K, G * T', d]
            read = read.unflatten(2, (-1, scores.shape[2])).flatten(1, 2)  # [B, H, T', d]
            read_lse = scores.logsumexp(-1).masked_fill(is_empty, float("-inf"))
            tokens = part.tokens
            if weights is not None:
                shares_of_sequence[:, :, tokens] = shares_of_both(lse[:, :, tokens], read_lse)[1]
            pieces.append(sequence_output[:, :, done : tokens.start])
            pieces.append(joint_attention(sequence_output[:, :, tokens], lse[:, :, tokens], read, read_lse))
            done = tokens.stop
        if weights is not None:
            weights = weights * shares_of_sequence.unsqueeze(-1).to(weights.dtype)
        joined = torch.cat([*pieces, sequence_output[:, :, done:]], dim=2).transpose(1, 2)
        return torch.where(packs.is_open[:, :, None, None], joined, output), weights
