"""Readings of entries that outlive sequences, within a context in which weights stand still."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache

from midus_hf.memories.decode_cache import CHANGING, ThreadScope, is_local_tensor
from midus_hf.memories.hosting.service import BankService, HostStack
from midus_hf.memories.packs.glossary_files import GlossaryFiles
from midus_hf.memories.packs.opening import PackKey
from midus_hf.memories.packs.reading import KeysAndValues, Pack, PackReader, TextIds, record_pass
from midus_hf.memories.registry import are_causal, memories_of

#: Largest number of bytes of readings that are kept of a model, unless the last text is larger.
MAX_BYTES = 1 << 30
# Numbers of a tensor that are compared at their places, since a sum does not see an exchange.
_SAMPLES = 256


@contextlib.contextmanager
def keep_readings(model: nn.Module, max_bytes: int = MAX_BYTES, check_numbers: bool = True) -> Iterator[None]:
    """Read each text of a glossary once, for all passes of this thread within the context.

    A reading is of what stands before an entry's text, and of texts, by their ids; so an edited entry is read anew. The words of a
    message are read on top of it. The readings used last are kept, and dropped at the end of the context.

    Whether weights, adapters, switched-off memories, hooks, autocast or the attention implementation changed is looked up each time
    that a name opens an entry. After a change everything is read anew. Seen are tensors that were replaced or moved, and edits that
    PyTorch counts; with `check_numbers` also those through `.data`, NumPy or a fused optimizer, unless they leave a tensor's sum and
    256 of its numbers as they were. Not seen are global hooks of PyTorch, and other attributes by which a module computes. In
    training mode, and in models with offloaded or quantised weights, a bank of blocks, or a memory that looks at later tokens,
    nothing is kept. Within another `keep_readings` of the same thread, the outer settings hold.

    Args:
        model: A model, a part of one, or a wrapper around one; without packs, nothing happens.
        max_bytes: Number of bytes to keep of each stack's readings. Default: 1 GiB.
        check_numbers: Whether to compare all numbers that a reading depends on, which takes about as long as to generate a token; if
            threads differ, all compare. Default: True. False is for code that has the model to itself.
    """
    opened = []
    try:
        for stack in model.modules():
            service = getattr(stack, "services", {}).get("packs") if isinstance(stack, HostStack) else None
            if service is None:
                continue
            with CHANGING:
                if service.store.readings is None:
                    service.store.readings = KeptReadings()
                readings = service.store.readings
                if not readings.is_open:
                    readings.max_bytes = max_bytes
                    readings.enter()
                    readings.checks_numbers |= check_numbers
                    opened.append(readings)
        yield
    finally:
        for readings in opened:
            readings.close()


class _Kept(NamedTuple):
    """What was read: keys and values of the texts by layer, and the cache after them, for words."""

    heads: tuple[KeysAndValues, ...]
    cache: Cache
    # Rows of the token table that were read, `[T, D]`; None if the state has the whole table.
    embedded: torch.Tensor | None
    num_bytes: int


class KeptReadings(ThreadScope):
    """Readings by their ids, the one used last at the end, and the state of the model that they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = MAX_BYTES
        self.drop()

    def drop(self) -> None:
        self.checks_numbers = False
        self._readings: dict[tuple[tuple[int, ...], tuple[int, ...]], _Kept] = {}
        self._state: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_readings": {}, "_state": []}

    def read(
        self, model: HostStack, run: Any, reader: PackReader, texts: Mapping[PackKey, TextIds], device: Any
    ) -> dict[PackKey, Pack]:
        """Return packs of texts, of readings that are kept, or that this call keeps."""
        table = _token_table(model) if self.checks_numbers else None
        state = _state_of(model, self.checks_numbers, table)
        if state is None:
            return reader.read(run, texts, device)
        with CHANGING:
            if not _are_same(state, self._state):
                self._readings, self._state = {}, state
            readings = self._readings  # of this state: another thread may begin new ones
        packs: dict[PackKey, Pack] = {}
        for key, ids in texts.items():
            named = ids.prefix, ids.text
            with CHANGING:
                kept = readings.pop(named, None)
            embedded = None if table is None else table.detach()[[*ids.prefix, *ids.text]]
            if kept is None or not _are_equal(kept.embedded, embedded):
                kept = _read(model, run, ids, device, embedded)
            with CHANGING:
                readings[named] = kept
                num_bytes = 0
                for other, each in reversed([*readings.items()]):
                    num_bytes += each.num_bytes
                    if num_bytes > self.max_bytes and other != named:
                        del readings[other]
            packs[key] = Pack(_with_words(run, kept, ids, device), len(ids.prefix))
        return packs


def _read(model: HostStack, run: Any, ids: TextIds, device: Any, embedded: torch.Tensor | None) -> _Kept:
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([[*ids.prefix, *ids.text]], device=device)
    positions = torch.arange(tokens.shape[1], device=device)[None]
    read = record_pass(run, tokens, positions, cache).in_order()
    heads = tuple((keys[0, :, len(ids.prefix) :], values[0, :, len(ids.prefix) :]) for keys, values in read)
    tensors = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for each in read for tensor in each}
    for layer in cache.layers:
        held = (each for each in vars(layer).values() if isinstance(each, torch.Tensor))
        tensors |= {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    num_bytes = sum(tensors.values()) + (0 if embedded is None else embedded.nbytes)
    return _Kept(heads, cache, embedded, num_bytes)


def _with_words(run: Any, kept: _Kept, ids: TextIds, device: Any) -> tuple[KeysAndValues, ...]:
    """Return keys and values of texts and of words after them."""
    if not ids.words:
        return kept.heads
    first, count = len(ids.prefix) + len(ids.text), len(ids.words)
    positions = torch.arange(first, first + count, device=device)[None]
    read = record_pass(run, torch.tensor([ids.words], device=device), positions, copy.deepcopy(kept.cache)).in_order()
    # Of layers with a window, attention reads the last texts only.
    words = [(keys[0, :, -count:], values[0, :, -count:]) for keys, values in read]
    return tuple(
        (torch.cat([keys, its_keys], 1), torch.cat([values, its_values], 1))
        for (keys, values), (its_keys, its_values) in zip(kept.heads, words, strict=True)
    )


def _token_table(model: HostStack) -> torch.Tensor | None:
    """Return the table of tokens, if passes read only the rows of their ids; otherwise None."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if not isinstance(embedding, nn.Embedding) or hasattr(embedding, "adapter_layer_names"):
        return None
    owners = [each for each in model.modules() if any(own is embedding.weight for own in each._parameters.values())]
    return embedding.weight if len(owners) == 1 else None


def _state_of(model: HostStack, checks_numbers: bool, table: torch.Tensor | None) -> list[Any] | None:
    """Return what readings depend on in addition to ids and a token table; None if it is not known."""
    has_blocks = any(
        isinstance(each, BankService) and not isinstance(each, GlossaryFiles) for each in model.services.values()
    )
    if has_blocks or not are_causal(memories_of(model.config)):
        return None
    tensors = [*model.parameters(), *model.buffers()]
    modules = [*model.modules()]
    are_local = all(is_local_tensor(each) for each in tensors if each.numel())
    if not are_local or any(each.training or hasattr(each, "_hf_hook") for each in modules):
        return None
    device = next(model.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    told: list[Any] = [model.dtype, model.config._attn_implementation, autocast]
    for module in modules:
        hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
        told += [module, hooks, vars(module).get("forward"), [*getattr(module, "sites", ())]]
        if hasattr(module, "adapter_layer_names"):
            names = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
            told += [repr(getattr(module, name, None)) for name in names]
    for tensor in tensors:
        told += [tensor, tensor.dtype, tensor.device, tensor.data_ptr()]
        has_version = not tensor.is_inference()
        told.append(tensor._version if has_version else None)
        if tensor is not table and (checks_numbers or not has_version):
            told += _content(tensor.detach())
    return told


def _content(tensor: torch.Tensor) -> tuple[int, list[int]]:
    """Return the sum of a tensor's bits, and some of its numbers, since a sum does not see an exchange."""
    flat = tensor.reshape(-1)
    num_bytes, first = flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()
    wide = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if num_bytes % kind.itemsize == 0 and first % kind.itemsize == 0
    )
    bits = flat.view(wide)
    return int(bits.sum()), bits[:: max(1, len(bits) // _SAMPLES)].tolist()


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _are_same(state: list[Any], other: list[Any]) -> bool:
    """Return whether two states are equal, tensors and modules by identity."""
    by_identity = (torch.Tensor, nn.Module)
    return len(state) == len(other) and all(
        one is two if isinstance(one, by_identity) else one == two for one, two in zip(state, other, strict=True)
    )
