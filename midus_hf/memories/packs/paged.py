"""Packs in vLLM: what requests have open, by slots of its cache, and attention to packs and the cache."""

import weakref
from collections import deque
from functools import cached_property
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import SequenceHeads
from midus_hf.memories.hosting.parts import Keywords, arguments_of_pass
from midus_hf.memories.hosting.service import Hosted, HostStack, Service, folder_of_checkpoint
from midus_hf.memories.hosting.vllm import (
    Slots,
    SlotStates,
    check_engine,
    find_layout,
    first_attention,
    part_of_vllm,
    pass_storage,
    serve_heads,
    slot_table,
    slots_of_pass,
)
from midus_hf.memories.packs.glossary_files import GlossaryFiles
from midus_hf.memories.packs.kept_readings import KeptReadings
from midus_hf.memories.packs.layer import PacksMemory
from midus_hf.memories.packs.opening import (
    NamedEntries,
    OpeningTracker,
    Reading,
    RowState,
    readings_of,
    state_of,
    state_shape,
    states_tensor,
)
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.paged_reads import Group, NativeReads, OpenedParts, TorchReads
from midus_hf.memories.packs.reading import RECORDING
from midus_hf.memories.packs.store import KeptPacks, PackStore
from midus_hf.memories.registry import Memories
from midus_hf.ops.dispatch.calling import resolve
from midus_hf.ops.paged_attention.native import BlockLayout, native_refusal

_CACHES = ("auto", "float16", "bfloat16", "float32")


class SlotOpenings:
    """What requests have open, from pass to pass by tables with a row for each slot of vLLM's cache."""

    def __init__(self, name: str, options: PacksOptions):
        self._name, self._options = name, options
        # Of requests of the last pass, by the slots of their last tokens, and the table that these slots are of.
        self._trackers: dict[int, OpeningTracker] = {}
        self._table: torch.Tensor | None = None

    def read(
        self, glossary: NamedEntries, attention: Any, slots: Slots, ids: torch.Tensor
    ) -> dict[int, list[Reading]]:
        """Return what requests' tokens read, after prefixes that this pass computes; keep ids and openings."""
        numbers = ids.long() + 1
        tokens_kept = slot_table(attention, f"{self._name}.ids", slots, numbers)
        none_open = numbers.new_zeros(1, *state_shape(self._options))
        openings_kept = slot_table(attention, f"{self._name}.open", slots, none_open)
        starts, tokens, own = slots.starts.tolist(), ids.tolist(), slots.own.tolist()
        tokens_kept[slots.own[: starts[-1]]] = numbers[: starts[-1]]
        tokens_kept[-1] = 0
        positions = slots.position.tolist()
        requests = [request for request in range(len(starts) - 1) if starts[request] < starts[request + 1]]
        number = torch.tensor(requests, device=ids.device)
        before = slots.at(number, slots.position[slots.starts[number]] - 1).tolist()
        coming = {*own[: starts[-1]]} - {slots.num_slots}
        known, self._trackers = self._trackers if self._table is tokens_kept else {}, {}
        self._table = tokens_kept
        known = {
            slot: each for slot, each in known.items() if slot not in coming and each.scan.index is glossary.index
        }
        rows: dict[int, list[Reading]] = {}
        states: dict[int, RowState] = {}  # after the tokens of the pass, by slot
        waiting = deque(zip(requests, before, strict=True))
        while waiting:
            request, last = waiting.popleft()
            if last in coming:
                waiting.append((request, last))
                continue
            span = slice(starts[request], starts[request + 1])
            tracker = known.pop(last, None)
            if tracker is None:
                state = states[last] if last in states else state_of(openings_kept[last].cpu())
                tracker = self._tracker(glossary, slots, request, positions[span.start], state)
            rows[request], after = readings_of(tracker, tokens[span], positions[span], None)
            states |= zip(own[span], after, strict=True)
            coming -= {*own[span]}
            self._trackers[own[span.stop - 1]] = tracker
        opened = states_tensor([[*states.values()]], self._options)[0].to(ids.device)
        openings_kept[torch.tensor([*states], device=ids.device)] = opened
        openings_kept[-1] = 0
        return rows

    def _tracker(
        self, glossary: NamedEntries, slots: Slots, request: int, position: int, state: RowState
    ) -> OpeningTracker:
        """Return what a request has open before a position, after which a state is kept."""
        table = self._table
        assert table is not None

        def earlier(first: int, end: int) -> list[int]:
            there = slots.at(request, torch.arange(first, end, device=table.device))
            return (table[there] - 1).tolist()

        tracker = OpeningTracker(glossary, self._options, state, earlier)
        first = max(position - glossary.lookback_tokens, 0)
        tracker.read_before(earlier(first, position), range(first, position))
        return tracker


class SharedReadings(KeptReadings):
    """Readings of texts for the requests of a model, whose weights stand still, by any thread."""

    @property
    def is_open(self) -> bool:
        """True: each pass reads what is kept."""
        return True


# The services of all models, for an operation that compilers do not look into: vLLM tells it the attention of its own model.
_SERVICES: "weakref.WeakSet[PagedPacksService]" = weakref.WeakSet()


class PagedPacksService(Service):
    """Packs that tokens of several requests read, as `packs`, an `OpenedPass`."""

    key = "packs"
    is_required = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        self.files = model.services[GlossaryFiles.key]
        self.store = PackStore(model, hosted)
        self.openings = SlotOpenings(self.store.name, self.store.options)
        self.store.readings = SharedReadings()
        self.kept = KeptPacks()
        others = [
            name
            for layer in model.layers
            for name, memory in getattr(layer, "memories", {}).items()
            if SlotStates in memory.services
        ]
        if others:
            raise RequestError(
                f"vLLM is not to serve packs with the memory {others[0]!r}, which would take texts of entries for requests; "
                "expected one of the two. Serve the model with `transformers serve`."
            )
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            raise RequestError(
                "this model caps scores of attention, which packs in vLLM do not; expected a model without "
                "attn_logit_softcapping. Serve it with `transformers serve`."
            )
        adapters = (
            "--enable-lora changes keys and values by request, and packs are one for all",
            "Leave the option out",
        )
        config = check_engine(self.store.name, {"lora_config": adapters})
        cache = part_of_vllm(config, "cache_config.cache_dtype")
        if cache not in _CACHES:
            raise RequestError(
                f"--kv-cache-dtype is {cache}, whose keys and values packs do not read; expected {', '.join(_CACHES[:-1])} or "
                f"{_CACHES[-1]}. Leave the option out."
            )
        self.model, self.settings = model, part_of_vllm(config, "model_config")
        for layer in self.store.layers:
            serve_heads(model.layers[layer].mixer_part)
        # Packs of requests that computed one token in the last pass, by who attends and what they read.
        self.steps: dict[Any, OpenedParts] = {}
        _SERVICES.add(self)  # here, since what a traced pass writes is not there when the graph runs

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Any:
        """Return the packs that tokens read, by the name of the memory."""
        if own.get(RECORDING) is not None:
            return {self.store.name: own[RECORDING]}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        name = self.store.name
        first = first_attention(model, name)
        return {name: OpenedPass(find_open_packs(ids[0], first.layer_name, name), name)}

    @classmethod
    def layer_arguments(cls, value: Any, name: str, layer: int) -> Keywords:
        return {"packs": value[name]}

    def serves(self, attention: Any) -> bool:
        """Return whether an attention of vLLM is that of a layer of the service's model."""
        parts = (getattr(layer, "mixer_part", None) for layer in self.model.layers)
        return any(getattr(part, "attn", None) is attention for part in parts)

    @torch.no_grad()
    def find_reads(self, ids: torch.Tensor, layer: str) -> TorchReads | NativeReads | None:
        """Return what tokens of the pass that runs read, from their ids `[T]`; None if they read nothing."""
        if self.files.glossary is None:  # vLLM makes the model of its config, and loads the weights itself
            self._begin()
        attention, slots = slots_of_pass(layer)
        if slots is None:
            return None
        rows = self.openings.read(self.files.glossary, attention, slots, ids)
        starts, positions = slots.starts.tolist(), slots.position.tolist()
        counts = {request: starts[request + 1] - starts[request] for request, readings in rows.items() if readings}
        steps = [request for request, count in counts.items() if count == 1]
        together = [[request] for request in counts if request not in steps]
        # C takes requests as they are; for PyTorch, those that compute one token are stacked.
        is_native = self._is_native(attention.kv_cache)
        together += [[request] for request in steps] if is_native else [steps] if steps else []
        kept, self.steps = self.steps, {}
        groups: list[Group] = []
        for requests in together:
            read, num_tokens = tuple(tuple(rows[request]) for request in requests), counts[requests[0]]
            parts = kept.get((is_native, read)) if num_tokens == 1 else None
            if parts is None:
                like = ids.new_empty(len(requests), num_tokens)
                opened = self.store.open(self.model, self._run, self.files.glossary, read, like, self.kept)
                if opened is None:
                    continue
                parts = OpenedParts(opened, self.attentions if is_native else None)
            if num_tokens == 1:
                self.steps[is_native, read] = parts
            first = [starts[request] for request in requests]
            groups += parts.groups(requests, first, [positions[each] for each in first], num_tokens)
        if not groups:
            return None
        return NativeReads(groups) if is_native else TorchReads(groups)

    @cached_property
    def attentions(self) -> list[Any]:
        """The attention of each layer with packs, once vLLM has made the model."""
        return [self.model.layers[layer].mixer_part for layer in self.store.layers]

    @cached_property
    def layouts(self) -> dict[str, BlockLayout]:
        """Layouts of blocks in vLLM's cache, once there is one, by the name of the layer."""
        return {each.attn.layer_name: find_layout(each.attn) for each in self.attentions}

    def _is_native(self, cache: torch.Tensor) -> bool:
        """Return whether compiled C attends to packs and such a cache."""
        refusal = next(filter(None, map(native_refusal, self.layouts.values())), None)
        return cache.dtype == self.model.dtype and resolve("auto", cache, native_refusal=refusal) == "native"

    def _begin(self) -> None:
        settings = self.settings
        options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        with torch.device("cpu"):
            self.files.open_bank(folder_of_checkpoint(settings.model, options, self.files.files), options)
        for attention in self.attentions:
            if part_of_vllm(attention, "attn.has_sink"):
                raise RequestError(
                    "this model has attention sinks, which packs in vLLM leave out; expected a model without. Serve it with "
                    "`transformers serve`."
                )

    def _run(self, **arguments: Any) -> None:
        """Run a pass over texts, which attends by torch and does not read vLLM's cache."""
        config = self.model.config
        config._attn_implementation, attention = "sdpa", config._attn_implementation
        try:
            self.model.forward(**arguments)  # not the call, which vLLM compiles
        finally:
            config._attn_implementation = attention


class OpenedPass(NamedTuple):
    """Packs of vLLM's pass, in its context under the memory's name; `opened` orders operations on them."""

    opened: torch.Tensor
    name: str


class PagedPacksMemory(PacksMemory):
    """A layer's part of packs: tokens that read packs attend again, to cache and packs in one softmax."""

    services = (GlossaryFiles, PagedPacksService)  # type: ignore[assignment]

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Take vLLM's attention, which is run again for packs."""

    def forward(self, *, sequence: SequenceHeads, packs: OpenedPass) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        """Attend to the sequence, and again with packs where a token reads any; return `[T, H d]`, and None."""
        module: Any = sequence.module
        output, weights = sequence.attend_to_sequence()
        attend_again(output, sequence.query[0], packs.opened, module.attn.layer_name, packs.name, self.index)
        return output, weights


# Opaque to compilers, which would bake in what vLLM tells of the first pass that it tries, in which there is no cache.
@torch.library.custom_op("midus::find_open_packs", mutates_args=())
def find_open_packs(ids: torch.Tensor, layer: str, name: str) -> torch.Tensor:
    """Find the packs that the tokens `[T]` of a pass read, and leave them in its context."""
    attention, _ = slots_of_pass(layer)
    service = next(each for each in _SERVICES if each.serves(attention))
    pass_storage()[f"midus.{name}"] = service, service.find_reads(ids, layer)
    return ids.new_zeros(1)


@find_open_packs.register_fake
def _(ids: torch.Tensor, layer: str, name: str) -> torch.Tensor:
    return ids.new_empty(1)


@torch.library.custom_op("midus::attend_again", mutates_args=("output",))
def attend_again(
    output: torch.Tensor, query: torch.Tensor, opened: torch.Tensor, layer: str, name: str, index: int
) -> None:
    """Overwrite rows of tokens that read packs in attention's output `[T, H d]`, from queries `[H, T, d]`."""
    service, reads = pass_storage()[f"midus.{name}"]
    if reads is not None:
        reads.attend(output, query, index, service.attentions[index], service.layouts[layer])


@attend_again.register_fake
def _(output: torch.Tensor, query: torch.Tensor, opened: torch.Tensor, layer: str, name: str, index: int) -> None:
    return None
