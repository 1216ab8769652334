"""Tensors that memories derive only from parameters, cached while weights do not change (MIDUS, C.2)."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from midus_hf.memories.module import MemoryModule
from midus_hf.ops.dispatch.private_torch import keep_address

#: Largest number of elements that a layer of chapters or of UltraMemV2 caches during a generation: 256 MB in float32.
MAX_CACHED = 1 << 26


@contextlib.contextmanager
def decode_cache(model: nn.Module) -> Iterator[None]:
    """Expand the values of every memory in `model` once, for all passes of this thread within the context.

    Expanded values are tensors that a memory derives only from its parameters: the values of each head, the keys and values of
    chapters, or the normalised keys of UltraMemV2 and the singular vectors of its cores.

    `generate` of a model with memory opens this context for each call. Nothing else does, because a change of weights cannot be
    detected (fused optimizers, `.data` and compiled steps leave no trace): weights must not change within the context.

    Eager, compiled and CUDA-graph passes inside the context all read the kept tensors. A graph captured inside the context may be
    replayed only inside it. A serving engine opens the context when it has loaded weights, and closes it before it loads others.
    Threads within the context at the same time share the kept tensors. Passes with gradients do not use them, nor do memories whose
    parameters cannot be read directly (offloaded, sharded, quantised, or computed from other tensors).

    Under `torch.autocast`, values are expanded in autocast's dtype. Results agree up to rounding, since values are expanded before
    they are gathered. `model` may be a part of a model, or a wrapper around one.
    """
    opened = []
    tables = _tables_of_readers(model)
    try:
        for module in model.modules():
            cache = _cache_of(module) if isinstance(module, MemoryModule) else None
            if cache is not None and cache.open(module, tables.get(id(module), {})):
                opened.append(cache)
        yield
    finally:
        for cache in opened:
            cache.close()


# Held while kept tensors are made and dropped, which several threads may read.
CHANGING = threading.RLock()


def _cache_of(memory: MemoryModule) -> "DecodeCache | None":
    """Return the cache of a memory, kept because code would be recompiled for another object."""
    with CHANGING:
        if memory.decode_cache is None:
            memory.decode_cache = memory.make_decode_cache()
    return memory.decode_cache


class ThreadScope:
    """Threads within a context, and what their passes read until the last one leaves; never saved."""

    def __init__(self) -> None:
        self._inside = threading.local()  # `now` if passes of this thread read what is kept
        self._num_threads = 0

    @property
    def is_open(self) -> bool:
        """True if passes of this thread read what is kept."""
        return getattr(self._inside, "now", False)

    def enter(self) -> None:
        """Let passes of this thread, which is not within the context, read what is kept."""
        with CHANGING:
            self._num_threads += 1
        self._inside.now = True

    def close(self) -> None:
        """Stop passes of this thread from reading what is kept."""
        self._inside.now = False
        with CHANGING:
            self._num_threads -= 1
            if self._num_threads == 0:
                self.drop()

    def drop(self) -> None:
        """Drop what is kept, while no thread reads it."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_inside": None, "_num_threads": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _inside=threading.local())
        self.drop()


class DecodeCache(ThreadScope):
    """Tensors derived from a module's parameters, made and dropped by `decode_cache`; not copied or saved.

    Args:
        parameters: Names of the parameters of the module, its linear layers or shared tables to derive the tensors from.
        derive: Function of these parameters that returns one tensor, or several of one dtype.
        as_stored: Whether `derive` takes stored dtypes under `torch.autocast` too. Default: false, parameters are cast.
    """

    def __init__(self, parameters: tuple[str, ...], derive: Callable[..., Any], as_stored: bool = False):
        super().__init__()
        self._parameters, self._derive, self._as_stored = parameters, derive, as_stored
        self._getters = tuple(map(attrgetter, parameters))
        self._derived: Any = None
        self._sources: tuple[torch.Tensor, ...] = ()
        self._stored_dtype: torch.dtype | None = None

    def open(self, module: nn.Module, tables: Mapping[str, torch.Tensor]) -> bool:
        """Make passes of this thread read the tensors, if possible; return whether this call changed that."""
        if self.is_open:
            return False
        with CHANGING:
            if self._derived is None:
                self._fill(module, tables)
            if self._derived is None:
                return False
            self.enter()
        return True

    def drop(self) -> None:
        self._derived, self._sources = None, ()

    def _fill(self, module: nn.Module, tables: Mapping[str, torch.Tensor]) -> None:
        if any(hasattr(part, "_hf_hook") for part in module.modules()) or not self._is_plain(module, tables):
            return
        sources = tuple(tables[name] if name in tables else attrgetter(name)(module) for name in self._parameters)
        if not all(map(is_local_tensor, sources)):
            return
        with torch.no_grad():
            derived = self._derive(*(source if self._as_stored else _as_computed_with(source) for source in sources))
        for tensor in (derived,) if isinstance(derived, torch.Tensor) else derived:
            if tensor.is_cuda:
                # A captured graph reads the tensor in place, like parameters, instead of copying it at every replay.
                keep_address(tensor, guard=False)
        self._derived, self._sources, self._stored_dtype = derived, sources, sources[0].dtype

    def read(self, module: nn.Module, like: torch.Tensor, tables: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return the kept tensors; None with gradients, changed parameters, or another dtype or device."""
        kept, sources = self._derived, self._sources
        if kept is None or not sources or torch.is_grad_enabled():
            return None
        first = kept if isinstance(kept, torch.Tensor) else kept[0]
        if first.dtype != like.dtype or first.device != like.device or sources[0].dtype != self._stored_dtype:
            return None
        if not torch.compiler.is_compiling():  # torch 2.11 cannot guard thread-local values
            if not self.is_open:
                return None
            # `torch.func.functional_call` may have replaced the parameters for this pass.
            for name, getter, then in zip(self._parameters, self._getters, sources, strict=True):
                if module._parameters.get(name) is then:
                    continue  # this quick test comes first, since its time matters in a pass of one token
                if (tables[name] if tables and name in tables else getter(module)) is not then:
                    return None
        return kept

    def _is_plain(self, module: nn.Module, tables: Mapping[str, torch.Tensor]) -> bool:
        """Return whether every parameter exists, and no linear layer is one of an adapter."""
        parents = [name.rpartition(".")[0] for name in self._parameters if name not in tables]
        is_plain = all(type(attrgetter(parent)(module)) is nn.Linear for parent in parents if parent)
        return is_plain and all(name in tables or "." in name or hasattr(module, name) for name in self._parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_derived": None, "_sources": ()}


def _tables_of_readers(model: Any) -> dict[int, Mapping[str, torch.Tensor]]:
    """Return the shared tables that memories read, by the `id` of each module, including PEFT's copies."""
    tables_of: dict[int, Mapping[str, torch.Tensor]] = {}
    for stack in (each for each in model.modules() if hasattr(each, "memory_tables")):
        for name, number_of_layer in stack.services["tables"].number_of_layer.items():
            for layer, number in number_of_layer.items():
                holder = stack.memory_tables[name][number]
                tables = {key: holder.declared_tensor(key) for key in holder.declared}
                tables_of |= {id(module): tables for module in stack.layers[layer].memories[name].modules()}
    return tables_of


def is_local_tensor(parameter: torch.Tensor) -> bool:
    """Return whether a tensor is plain, unsharded and not meta."""
    return (
        type(parameter) in (nn.Parameter, torch.Tensor) and parameter.device.type != "meta" and parameter.numel() > 0
    )


def _as_computed_with(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter or buffer in the dtype that a pass would use now; integers unchanged."""
    device = parameter.device.type
    if not (parameter.is_floating_point() and torch.is_autocast_enabled(device)):
        return parameter
    return parameter.to(torch.get_autocast_dtype(device))
