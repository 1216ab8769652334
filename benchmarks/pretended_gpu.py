"""A GPU that is not there, so that what a lent one will be asked is asked before.

Tensors on `"cuda"` are fake: they have shapes, dtypes and devices, and no values. Kernels are compiled for an H200 instead
of run. What only a device could answer is made up, and every question is noted that a real device would have had to be
waited for.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels.compilation import Launch, compile_for, specialisation

NAME = "pretended NVIDIA H200"
"""Of the device, in rows as well; the roofline of an H200 is known by it."""
TARGET = "sm_90"
_CLOCK_MS = 1.0
_ROOT = Path(__file__).parent.parent


class PretendedGpu:
    """What a rehearsal saw.

    Attributes:
        kernels: Launches of each kernel, by its name; each way of compiling it was compiled once.
        waits: Questions that a device would have had to be waited for, by the line of this project or of Transformers that
            asked.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.is_capturing = False
        self._compiled: set[str] = set()

    def launch(self, launch: Launch) -> None:
        """Compile a launch, unless one like it was compiled before."""
        self.kernels[launch.kernel.__name__] += 1
        key = str((launch.kernel.__name__, specialisation(launch), launch.options))
        if key not in self._compiled:
            compile_for(launch, TARGET)
            self._compiled.add(key)

    def report(self) -> str:
        """Both, in words."""
        kernels = ", ".join(f"{name} ({count:,})" for name, count in self.kernels.most_common()) or "none"
        waits = ", ".join(f"{where} ({count:,})" for where, count in self.waits.most_common()) or "none"
        return f"{len(self._compiled)} kernels compiled for {TARGET} and launched: {kernels}\nThe device was waited for at: {waits}"

    def wait(self) -> None:
        """Note who asked for a value."""
        own = [frame for frame in traceback.extract_stack()[:-1] if _is_of_interest(frame.filename)]
        where = f"{_short(own[-1].filename)}:{own[-1].lineno}" if own else "elsewhere"
        self.waits[where] += 1


@contextlib.contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Pretend that there is a GPU: `"cuda"` can be asked for as a device, and nothing on it is computed.

    `torch.compile` does nothing within, as its code generator asks the driver; kernels of this project are compiled.
    """
    gpu = PretendedGpu()
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _stand_ins(gpu):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Answers(gpu))
        yield gpu


class _Answers(TorchDispatchMode):
    """Values that nobody computed: True, 0 or 0.0; what is asked ends every loop that waits for a condition."""

    def __init__(self, gpu: PretendedGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.gpu.wait()
            dtype = args[0].dtype
            return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if function is torch.ops.aten.equal.default:
            self.gpu.wait()
            return True
        return function(*args, **(kwargs or {}))


class _Event:
    """A moment on the device; any two are equally far apart."""

    def __init__(self, enable_timing: bool = False):
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_Event") -> float:
        return _CLOCK_MS


class _Graph:
    """A captured graph, which launches nothing when it is replayed."""

    def replay(self) -> None:
        pass


class _Stream:
    def wait_stream(self, other: "_Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Generator(torch.Generator):
    """Of random numbers that nobody draws, on whatever device."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


def _stand_ins(gpu: PretendedGpu) -> list[tuple[Any, str, Any]]:
    """What is replaced: the owner, the name and what stands there instead."""
    from triton.runtime.jit import JITFunction

    @contextlib.contextmanager
    def capture(graph: _Graph, **keywords: Any) -> Iterator[None]:
        gpu.is_capturing = True
        try:
            yield
        finally:
            gpu.is_capturing = False

    def launch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        gpu.launch(Launch.of(self, arguments, keywords))

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
        "is_current_stream_capturing": lambda: gpu.is_capturing,
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
        (torch, "compile", lambda function=None, **keywords: function),
        (JITFunction, "run", launch),
    ]


def _is_of_interest(file: str) -> bool:
    path = Path(file)
    return "transformers" in path.parts or (path.is_relative_to(_ROOT) and path.name != Path(__file__).name)


def _short(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
        return str(path.relative_to(_ROOT))
    return str(Path(*path.parts[path.parts.index("transformers") :]))
