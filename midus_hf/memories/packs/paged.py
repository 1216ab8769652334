"""Packs in vLLM: what requests have open, by slots of its cache, and attention to packs and the cache."""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import SequenceHeads
from midus_hf.memories.hosting.parts import Keywords, arguments_of_pass
from midus_hf.memories.hosting.service import Hosted, HostStack, Service, folder_of_checkpoint
from midus_hf.memories.hosting.vllm import (
    CachedHeads,
    Slots,
    SlotStates,
    blocks_of_pass,
    check_engine,
    first_attention,
    part_of_vllm,
    pass_storage,
    serve_heads,
    slot_table,
    slots_of_pass,
)
from midus_hf.memories.packs.glossary_files import GlossaryFiles
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
from midus_hf.memories.packs.placing import OpenPacks, PackPart
from midus_hf.memories.packs.reading import RECORDING
from midus_hf.memories.packs.store import KeptPacks, PackStore
from midus_hf.memories.registry import Memories

_CACHES = ("auto", "float16", "bfloat16", "float32")
_MAX_TOKENS_AT_ONCE = 256


class Group(NamedTuple):
    """Requests of a pass whose tokens read packs, with as many tokens each: N requests, T' tokens."""

    opened: OpenPacks  # with a row for each
    requests: torch.Tensor  # `[N]`, numbers of the requests
    tokens: torch.Tensor  # `[N, T']`, numbers of the tokens in the row of the pass
    positions: torch.Tensor  # `[N, T']`
    lengths: torch.Tensor  # `[N]`, tokens of each request up to the last of the pass


class SlotOpenings:
    """What requests have open, from pass to pass by tables with a row for each slot of vLLM's cache."""

    def __init__(self, name: str, options: PacksOptions):
        self._name, self._options = name, options

    def read(
        self, glossary: NamedEntries, attention: Any, slots: Slots, ids: torch.Tensor
    ) -> dict[int, list[Reading]]:
        """Return what requests' tokens read, after prefixes that this pass computes; keep ids and openings."""
        options = self._options
        numbers = ids.long() + 1
        tokens_kept = slot_table(attention, f"{self._name}.ids", slots, numbers)
        openings_kept = slot_table(attention, f"{self._name}.open", slots, numbers.new_zeros(1, *state_shape(options)))
        starts = slots.starts.tolist()
        requests = [request for request in range(len(starts) - 1) if starts[request] < starts[request + 1]]
        tokens_kept[slots.own[: starts[-1]]] = numbers[: starts[-1]]
        tokens_kept[-1] = 0
        number = torch.tensor(requests, device=ids.device)
        first = slots.position[slots.starts[number]]
        back = torch.arange(glossary.lookback_tokens, 0, -1, device=ids.device)
        before = slots.at(number[:, None], first[:, None] - back)
        ids_before = (tokens_kept[before] - 1).tolist()
        open_before = openings_kept[before[:, -1]].cpu()
        tokens, positions, own = ids.tolist(), slots.position.tolist(), slots.own.tolist()
        rows: dict[int, list[Reading]] = {}
        states: dict[int, RowState] = {}  # after the tokens of the pass, by slot
        waiting = deque(enumerate(requests))
        coming = {*own[: starts[-1]]} - {slots.num_slots}
        while waiting:
            at, request = waiting.popleft()
            span, last = slice(starts[request], starts[request + 1]), int(before[at, -1])
            if last in coming:
                waiting.append((at, request))
                continue

            def earlier(first: int, end: int, number: torch.Tensor = number[at, None, None]) -> list[int]:
                there = slots.at(number, torch.arange(first, end, device=ids.device)[None])
                return (tokens_kept[there[0]] - 1).tolist()

            state = states[last] if last in states else state_of(open_before[at])
            names = OpeningTracker(glossary, options, state, earlier)
            there = range(max(positions[span.start] - glossary.lookback_tokens, 0), positions[span.start])
            names.read_before(ids_before[at][glossary.lookback_tokens - len(there) :], there)
            rows[request], after = readings_of(names, tokens[span], positions[span], None)
            states |= zip(own[span], after, strict=True)
            coming -= {*own[span]}
        opened = states_tensor([[*states.values()]], options)[0].to(ids.device)
        openings_kept[torch.tensor([*states], device=ids.device)] = opened
        openings_kept[-1] = 0
        return rows


# The services of all models, for an operation that compilers do not look into: vLLM tells it the attention of its own model.
_SERVICES: "weakref.WeakSet[PagedPacksService]" = weakref.WeakSet()


class PagedPacksService(Service):
    """Packs that tokens of several requests read, as `packs`, an `OpenedPass`."""

    key = "open_packs"
    is_required = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        self.files = model.services[GlossaryFiles.key]
        self.store = PackStore(model, hosted)
        self.openings = SlotOpenings(self.store.name, self.store.options)
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
        self.heads: dict[str, CachedHeads] = {}
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
    def groups(self, ids: torch.Tensor, layer: str) -> list[Group]:
        """Return the requests of the pass that runs whose tokens read packs, from the ids `[T]` of its tokens."""
        if self.files.glossary is None:  # vLLM makes the model of its config, and loads the weights itself
            self._begin()
        attention, slots = slots_of_pass(layer)
        if slots is None:
            return []
        rows = self.openings.read(self.files.glossary, attention, slots, ids)
        starts = slots.starts.tolist()
        spans = {
            request: range(starts[request], starts[request + 1]) for request, readings in rows.items() if readings
        }
        steps = [request for request, tokens in spans.items() if len(tokens) == 1]
        apart = [[request] for request in spans if request not in steps]
        groups = (self._group(slots, ids, rows, spans, each) for each in (*apart, *([steps] if steps else [])))
        return [group for group in groups if group is not None]

    def _begin(self) -> None:
        settings = self.settings
        options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        with torch.device("cpu"):
            self.files.open_bank(folder_of_checkpoint(settings.model, options, self.files.files), options)
        for layer in self.store.layers:
            attention = self.model.layers[layer].mixer_part
            if part_of_vllm(attention, "attn.has_sink"):
                raise RequestError(
                    "this model has attention sinks, which packs in vLLM leave out; expected a model without. Serve it with "
                    "`transformers serve`."
                )

    def _group(
        self,
        slots: Slots,
        ids: torch.Tensor,
        rows: Mapping[int, list[Reading]],
        spans: Mapping[int, range],
        requests: Sequence[int],
    ) -> Group | None:
        """Return requests that have as many tokens each as a group; None if they read nothing."""
        tokens = torch.tensor([list(spans[request]) for request in requests], device=ids.device)
        number = torch.tensor(requests, device=ids.device)
        read = [rows[request] for request in requests]
        opened = self.store.open(self.model, self._run, self.files.glossary, read, ids[tokens], self.kept)
        positions = slots.position[tokens]
        return None if opened is None else Group(opened, number, tokens, positions, positions[:, -1] + 1)

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
    pass_storage()[f"midus.{name}"] = service, service.groups(ids, layer)
    return ids.new_zeros(1)


@find_open_packs.register_fake
def _(ids: torch.Tensor, layer: str, name: str) -> torch.Tensor:
    return ids.new_empty(1)


@torch.library.custom_op("midus::attend_again", mutates_args=("output",))
def attend_again(
    output: torch.Tensor, query: torch.Tensor, opened: torch.Tensor, layer: str, name: str, index: int
) -> None:
    """Overwrite rows of tokens that read packs in attention's output `[T, H d]`, from queries `[H, T, d]`."""
    service, groups = pass_storage()[f"midus.{name}"]
    for group in groups:
        for part in group.opened.parts:
            tokens = range(group.tokens.shape[1])[part.tokens]
            for first in range(tokens.start, tokens.stop, _MAX_TOKENS_AT_ONCE):
                some = slice(first, min(first + _MAX_TOKENS_AT_ONCE, tokens.stop))
                within = slice(some.start - tokens.start, some.stop - tokens.start)
                bias = None if part.bias is None else part.bias[:, within]
                of_some = part._replace(reads=part.reads[:, within], bias=bias)
                _attend(output, query, service, group, of_some, some, layer, index)


@attend_again.register_fake
def _(output: torch.Tensor, query: torch.Tensor, opened: torch.Tensor, layer: str, name: str, index: int) -> None:
    return None


def _attend(
    output: torch.Tensor,
    query: torch.Tensor,
    service: PagedPacksService,
    group: Group,
    part: PackPart,
    some: slice,
    layer: str,
    index: int,
) -> None:
    """Overwrite rows of some tokens of a part of a group; S keys of requests, and S' of packs."""
    module = service.model.layers[service.store.layers[index]].mixer_part
    attention = module.attn
    if layer not in service.heads:
        service.heads[layer] = CachedHeads(attention)
    block_size = service.heads[layer].sizes[0]
    num_blocks = -(-int(group.lengths.max()) // block_size)
    blocks = blocks_of_pass(layer, group.requests, num_blocks)
    keys, values = service.heads[layer].read(attention.kv_cache, blocks)  # [N, n, K, tokens, d]
    place = torch.arange(num_blocks * block_size, device=query.device)
    is_there = place < group.lengths[:, None]  # [N, S]
    # What else lies in the last block may be no number.
    values = torch.where(is_there.view(*blocks.shape, 1, -1, 1), values, 0)
    positions, tokens = group.positions[:, some, None], group.tokens[:, some]
    is_read = place <= positions  # [N, T', S]
    if attention.sliding_window is not None:
        is_read = is_read & (place > positions - attention.sliding_window)
    pack_keys, pack_values = group.opened.of(index, part, module)
    asked = query[:, tokens].transpose(0, 1).unflatten(1, (pack_keys.shape[1], -1)).flatten(2, 3)  # [N, K, G T', d]
    of_sequence = (asked[:, None] @ keys.transpose(-1, -2)).permute(0, 2, 3, 1, 4).flatten(3)  # [N, K, G T', S]
    scores = torch.cat([asked @ pack_keys.transpose(-1, -2), of_sequence], -1).float() * attention.impl.scale
    scores = scores.unflatten(2, (-1, tokens.shape[1]))  # [N, K, G, T', S' + S]
    num_slots = pack_keys.shape[2]
    if part.bias is not None:
        scores[..., :num_slots] += part.bias[:, None, None]
    is_read = torch.cat([part.reads, is_read], -1)[:, None, None]
    shares = scores.masked_fill(~is_read, float("-inf")).softmax(-1).flatten(2, 3).to(values.dtype)
    of_packs, of_sequence = shares[..., :num_slots], shares[..., num_slots:]
    of_sequence = of_sequence.unflatten(-1, (num_blocks, block_size)).permute(0, 3, 1, 2, 4)  # [N, n, K, G T', tokens]
    read = of_packs @ pack_values + (of_sequence @ values).sum(1)  # [N, K, G T', d]
    read = read.unflatten(2, (-1, tokens.shape[1])).permute(0, 3, 1, 2, 4).flatten(2)  # [N, T', H d]
    reads = part.reads.any(-1)
    output[tokens[reads]] = read[reads].to(output.dtype)
