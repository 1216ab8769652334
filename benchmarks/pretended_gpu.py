"""Pretend a GPU, so that code for a GPU runs once before it runs on a real one.

The CPU does all work for `"cuda"`: tensors have real values, and kernels run in Triton's interpreter. PyTorch's GPU
objects (events, streams, graphs, memory) have stand-ins; the stand-in of a captured graph records the calls within and
repeats them. Sizes should be tiny, and times mean nothing.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import timing
from benchmarks.interpreter import mended_interpreter

# Name of the device, also in rows. It must name an H200, whose roofline is known.
NAME = "pretended NVIDIA H200"


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Pretend a GPU while the context lasts.

    `torch.compile` does nothing meanwhile, because it would see a CPU. This project's ops run the kernels that they
    would run on a GPU, if `TRITON_INTERPRET` was set before the ops were imported.
    """
    from midus_hf.ops import op_choices
    from midus_hf.ops.dispatch.triton import HAS_TRITON

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _stand_ins():
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(mended_interpreter())
        stack.enter_context(_OnTheCpu())
        stack.enter_context(op_choices(backend="triton" if HAS_TRITON else "auto"))
        yield


@contextlib.contextmanager
def chosen_device(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield `"cpu"` or `"cuda"`, as the options of `add_device` choose; a pretended GPU exists while the context lasts."""
    if arguments.rehearse:
        with pretended_gpu():
            yield "cuda"
    else:
        yield arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class _OnTheCpu(TorchFunctionMode):
    """Mode that moves every PyTorch call for `"cuda"` to the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] == "cuda")
    return torch.device("cpu") if is_device and torch.device(value).type == "cuda" else value


class _Generator(torch.Generator):
    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


class _Event:
    """Event that records the time of the clock."""

    def __init__(self, enable_timing: bool = False):
        self.time = 0.0

    def record(self, stream: object = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "_Event") -> float:
        return 1e3 * (end.time - self.time)


class _Stream:
    def wait_stream(self, other: "_Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Graph:
    """Calls that were made during a capture, with the tensors that they were made on."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, results in self.calls:
                again = function(*args, **kwargs)
                for result, anew in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != anew.data_ptr():
                        result.copy_(anew)


class _Capture(TorchDispatchMode):
    """Mode that records calls and undoes their writes at its end, because a capture runs nothing.

    A call by which the host waits for a value raises RuntimeError, as on a GPU.
    """

    def __init__(self, graph: _Graph):
        super().__init__()
        self.graph = graph
        self.written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError("the host waits for a value of the device while a graph is captured.")
        named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        for argument in function._schema.arguments:
            value = named.get(argument.name)
            if argument.is_write and isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.written.setdefault(storage.data_ptr(), (storage, storage.clone()))
        results = function(*args, **(kwargs or {}))
        self.graph.calls.append((function, args, kwargs or {}, results))
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, before in self.written.values():
            storage.copy_(before)


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """Return what to replace, as triples (owner, name of the attribute, stand-in)."""
    is_capturing = False

    @contextlib.contextmanager
    def capture(graph: _Graph, **keywords: Any) -> Iterator[None]:
        nonlocal is_capturing
        is_capturing = True
        try:
            with _Capture(graph):
                yield
        finally:
            is_capturing = False

    def nothing(*args: Any, **keywords: Any) -> None:
        pass

    properties = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=139 << 30)
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: is_capturing,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": capture,
        **dict.fromkeys(("synchronize", "_sleep", "empty_cache", "reset_peak_memory_stats", "_lazy_init"), nothing),
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
    }
    return [
        *((torch.cuda, name, stand_in) for name, stand_in in cuda.items()),
        (torch, "Generator", _Generator),
        (timing, "_activities", lambda device: [ProfilerActivity.CPU]),
        (timing, "_is_kernel", lambda event: True),
        (timing, "_FLUSHED_BYTES", 1 << 10),
        (timing, "_FEWEST_ROUNDS", 1),
        (torch, "compile", lambda function=None, **keywords: function),
    ]
