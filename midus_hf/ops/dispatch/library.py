"""The library of compiled ops, loaded when first needed, and calls of its functions.

C's structures are packed field by field: filling a `ctypes.Structure` takes longer than the lookup of a decoding step.
"""

import ctypes
import platform
import struct
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from midus_hf.ops.dispatch.build import CACHE_VARIABLE, X86, NotBuilt, built_library, is_off

NATIVE_DTYPES = (torch.float32, torch.bfloat16)  # dtypes that compiled C computes with
_FUNCTIONS = tuple(
    f"midus_{name}"
    for name in ("lookup", "score_gradients", "weighted_rows", "gathered_products", "row_sums", "paged_attention")
)
_loading = threading.Lock()
_library: ctypes.CDLL | None = None
_missing: str | None = None


def native_library() -> ctypes.CDLL | None:
    """Return the library, built and loaded by the first call of a process, or None after one warning.

    Do not call it while a graph is traced: it reads files and starts a compiler.
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
        packaged = Path(__file__).with_name(f"native_{variant()}.so")  # in a wheel
        _library = _open(packaged if packaged.is_file() else built_library(variant()))
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


def _structure(addresses: str, numbers: str, more: str = "", reals: str = "") -> struct.Struct:
    """Return a structure of named pointers (0 for none), doubles, 64-bit integers, and fields with codes `more`."""
    return struct.Struct(f"@{len(addresses.split())}P{len(reals.split())}d{len(numbers.split())}q{more}")


_OWN = "32x"  # fields that C fills in a copy: `struct tables` and the number of groups of heads
# `struct lookup` in `product_key/lookup.c`.
LOOKUP_CALL = _structure(
    "query row_keys column_keys bank transform residual output slots weights",
    "tokens heads n half width k query_token query_head residual_token residual_head bank_head "
    "narrow residual_narrow slot_bytes raw threads",
    _OWN,
)
# `struct score_gradients` in `product_key/lookup_gradients.c`.
SCORE_GRADIENTS_CALL = _structure(
    "gradient query row_keys column_keys bank transform slots weights into_query into_row_keys into_column_keys into_transform "
    "passed parts transform_parts",
    "tokens heads n half width k gradient_token gradient_head query_token query_head bank_head "
    "narrow gradient_narrow slot_bytes stretch raw threads",
    _OWN,
)
# `struct row_sums` in `gather/native.c`.
ROW_SUMS_CALL = _structure(
    "gradient slots weights into",
    "tokens heads rows width k gradient_token gradient_head into_head gradient_narrow slot_bytes threads",
)
# `struct gathers` in `gather/native.c`.
GATHERS_CALL = _structure(
    "bank slots factors into",
    "tokens rows width k factors_token narrow factors_narrow slot_bytes threads",
    "8x",  # passes
)
# `struct paged_attention` in `paged_attention/native.c`.
PAGED_ATTENTION_CALL = _structure(
    "query cache output parts",
    "layer count heads group width block_tokens block_bytes query_token query_head output_token cache_block "
    "first_key key_head first_value value_head window narrow threads",
    "24x",  # stretch, padded_width, columns
    reals="scale",
)
# `struct part` there.
PAGED_PART = _structure("tables reads bias blocks", "first tokens position extra")
# Least product of tokens and heads for which threads are started: this takes as long as some hundreds of rows.
_MIN_SHARED = 512

_OUTSIDE = 2  # status that C returns if a slot is outside its table


def run(name: str, structure: struct.Struct, rows: int, *fields: float) -> None:
    """Call a function of the loaded library with fields of a structure that ends in `threads`.

    As many threads work on `rows` rows, the product of tokens and heads, as torch has; on few rows one.
    """
    library: Any = _library
    threads = 1 if rows < _MIN_SHARED else torch.get_num_threads()
    status = getattr(library, name)(structure.pack(*fields, threads))
    if status == _OUTSIDE:
        raise IndexError("slots are outside the bank; expected 0 <= slot < its rows. Check the code that made them.")
    if status:
        raise MemoryError(f"{name} cannot allocate scratch memory; free some, or choose backend 'torch'.")


def refuse_places(tensors: Mapping[str, Tensor | None]) -> NoReturn:
    """Raise a `ValueError` that names a tensor outside the CPU's memory, which would crash C."""
    name, device = next(
        (name, tensor.device) for name, tensor in tensors.items() if tensor is not None and not tensor.is_cpu
    )
    raise ValueError(
        f"{name} is on {device}, and others are on cpu; expected one device. Move or load the whole model there."
    )


def with_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension; other dimensions may have any strides."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def gradient_rows(gradient: Tensor) -> Tensor:
    """Return the gradient with a contiguous last dimension, in a dtype that C reads."""
    return with_rows(gradient if gradient.dtype in NATIVE_DTYPES else gradient.float())
