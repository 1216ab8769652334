"""The library of compiled bodies, loaded when it is first needed; None if it can be neither found nor built."""

import ctypes
import platform
import threading
import warnings
from pathlib import Path

import torch

from midus_hf.ops.dispatch.native.build import CACHE_VARIABLE, X86, NotBuilt, built_library, is_off

_FUNCTIONS = (
    "midus_lookup",
    "midus_score_gradients",
    "midus_weighted_rows",
    "midus_gathered_products",
    "midus_row_sums",
)

_loading = threading.Lock()
_library: ctypes.CDLL | None = None
_missing: str | None = None


def native_library() -> ctypes.CDLL | None:
    """Return the library, or None if there is none.

    The first call of a process builds the library if it is missing and loads it, or warns once that this failed. Do not
    call this function while a graph is traced: it reads files and starts a compiler.
    """
    if _library is None and _missing is None:
        with _loading:
            if _library is None and _missing is None:
                _load()
    return _library


def why_missing() -> str | None:
    """Return why there is no library and what to do about it; None if there is one."""
    native_library()
    return _missing


def variant() -> str:
    """Return the widest instruction set of this processor according to PyTorch: a key of `VARIANTS`."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() not in X86:
        return "baseline"
    return "avx512" if capability.startswith("AVX512") else "avx2" if capability == "AVX2" else "baseline"


def _load() -> None:
    global _library, _missing
    if is_off():
        _missing = f"{CACHE_VARIABLE} is off; unset it"
        return
    try:
        _library = _open(_packaged() or built_library(variant()))
    except NotBuilt as reason:
        _missing = str(reason)
    except (OSError, AttributeError) as error:
        _missing = f"it does not load ({error}); set {CACHE_VARIABLE} to another folder"
    if _missing is not None:
        warnings.warn(
            "memory is computed by PyTorch on this CPU, which takes two to seven times as long, since its C code could not be "
            f"built: {_missing}, or set {CACHE_VARIABLE}=off to do without.",
            RuntimeWarning,
            stacklevel=2,
        )


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in _FUNCTIONS:
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return library


def _packaged() -> Path | None:
    """Return the path of the library for this processor that the wheel contains, or None."""
    path = Path(__file__).with_name(f"native_{variant()}.so")
    return path if path.is_file() else None
