"""Launches of Triton's kernels that do nothing, so that what the host spends on them can be timed without a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from midus_hf.ops import op_choices
from midus_hf.ops.dispatch import choices as backend

_TARGET = GPUTarget("cuda", 90, 32)


class _Utils:
    def load_binary(self, name: str, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spilled registers, threads at most."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H100, as far as triton asks."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    """Stands where triton has a function in C that launches a kernel."""

    def __init__(self, source: object, metadata: object):
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class _IdleDriver:
    """All that triton asks of a GPU when it compiles and launches a kernel."""

    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _TARGET


@contextlib.contextmanager
def idle_launches() -> Iterator[None]:
    """Let ops take their kernels for CPU tensors, compiled for an H100 and prepared as ever, but never run: outputs are not filled.

    What PyTorch itself would spend on launching is not in it either, on any side.

    Raises:
        SystemExit: If triton interprets kernels, which then are not compiled.
    """
    if backend.interprets_kernels():
        raise SystemExit("TRITON_INTERPRET is 1, so kernels are interpreted; unset it, or choose other bodies.")
    with (
        patch.object(driver, "_active", _IdleDriver()),
        patch.object(backend, "interprets_kernels", lambda: True),
        op_choices(backend="triton"),
    ):
        yield
