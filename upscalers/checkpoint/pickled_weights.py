"""PyTorch's own weight files (`.bin`): positions of their tensors, read without running what the files pickle.

A file holds a pickle that describes tensors, and their bytes uncompressed: as entries of a zip archive, or, before
PyTorch 1.6, behind the pickle. So tensors can be read by position, as from safetensors. The pickle is read with
an unpickler that knows a handful of harmless names, each replaced by code of this module; a pickle that names anything
else is refused before anything is called.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from upscalers.checkpoint.safetensors_format import ITEM_BYTES, StoredTensor
from upscalers.request.errors import RequestError

_DTYPES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32",
    "uint64": "U64",
}  # fmt: skip
_UNTYPED = "UntypedStorage"
# What a file from before PyTorch 1.6 begins with: a pickled magic number.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_STORAGE = struct.Struct("<q")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\x03\x04"
# What a file may hold beside tensors, such as a count of steps.
_BESIDE_TENSORS = (int, float, str, bytes, type(None))
_UNSOUND = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, ValueError, TypeError, AttributeError,
    LookupError, OverflowError, NotImplementedError, RecursionError, MemoryError,
)  # fmt: skip


def read_pickled(file: Path) -> dict[str, StoredTensor]:
    """Return the dtype, shape and position of each tensor of a `.bin` file, without running code that the file names.

    Tensors that share their bytes have the same position. Numbers and texts beside the tensors are left out
    (`names_beside_tensors`): transformers does not load them either.

    Raises:
        RequestError: If the pickle asks for code to be run, holds anything but tensors by name, or is not sound, or if
            the elements of a tensor do not lie one after another.
    """
    try:
        state, storages = _read(file)
        tensors = {name: value for name, value in state.items() if not isinstance(value, _BESIDE_TENSORS)}
        if state and not tensors:
            raise pickle.UnpicklingError(
                f"{next(iter(state))!r} is {_kind(next(iter(state.values())))} instead of a tensor"
            )
        return {name: _stored(name, tensor, storages, file) for name, tensor in tensors.items()}
    except RequestError:
        raise
    except _UNSOUND as error:
        raise _unsound(file, str(error) or type(error).__name__) from None


def names_beside_tensors(file: Path) -> list[str]:
    """Return the names of the numbers and texts that a `.bin` file, which `read_pickled` reads, holds beside its tensors."""
    return [str(name) for name, value in _read(file)[0].items() if isinstance(value, _BESIDE_TENSORS)]


def _read(file: Path) -> "tuple[dict[Any, Any], dict[str, _Span]]":
    """Return what a file holds by name, and the position of each storage by its key."""
    with file.open("rb") as stream:
        is_archive = stream.read(len(_LOCAL_SIGNATURE)) == _LOCAL_SIGNATURE
        stream.seek(0)
        state, storages = _read_archive(stream, file) if is_archive else _read_legacy(stream, file)
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"it holds {_kind(state)} instead of tensors by name")
    return dict(dict.items(state)), storages


def _read_archive(stream: BinaryIO, file: Path) -> "tuple[Any, dict[str, _Span]]":
    """Return what an archive's pickle holds, and the position of each storage by its key."""
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    spans = {name: _span(stream, entry) for name, entry in entries.items()}
    if "data.pkl" not in spans:
        raise zipfile.BadZipFile("it has no data.pkl")
    if "byteorder" in spans and _bytes_of(stream, spans["byteorder"]) != b"little":
        raise zipfile.BadZipFile("its numbers are big-endian")
    state = _Inert(io.BytesIO(_bytes_of(stream, spans["data.pkl"])), file).load()
    return state, {name.removeprefix("data/"): span for name, span in spans.items() if name.startswith("data/")}


def _read_legacy(stream: BinaryIO, file: Path) -> "tuple[Any, dict[str, _Span]]":
    """Return what a file from before PyTorch 1.6 holds, and the position of each storage by its key."""
    first = _Inert(stream, file).load()
    if first != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("it does not begin as files of torch.save do")
    _, system, unpickler = _Inert(stream, file).load(), _Inert(stream, file).load(), _Inert(stream, file)
    if not system.get("little_endian"):
        raise pickle.UnpicklingError("its numbers are big-endian")
    state, keys = unpickler.load(), _Inert(stream, file).load()
    spans: dict[str, _Span] = {}
    num_bytes = file.stat().st_size
    for key in keys:
        (elements,) = _LEGACY_STORAGE.unpack(stream.read(_LEGACY_STORAGE.size))
        spans[key] = _Span(stream.tell(), elements * ITEM_BYTES[unpickler.dtypes[key]])
        if elements < 0 or spans[key].end > num_bytes:
            raise EOFError("its tensors end early")
        stream.seek(spans[key].end)
    return state, spans


@dataclass(frozen=True)
class _Span:
    """A range of bytes of a file."""

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True)
class _Storage:
    """A storage that tensors are views of; the dtype is None if the storage leaves it to the tensors."""

    key: str
    dtype: str | None


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it: a part of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _view(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> _View:
    return _View(storage, offset, shape, strides)


def _typed_view(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], _: object, __: object, dtype: str
) -> _View:
    return _View(replace(storage, dtype=dtype), offset, shape, strides)


def _parameter(view: _View, *_: object) -> _View:
    return view


def _ordered() -> "OrderedDict[Any, Any]":
    return OrderedDict()


_CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class _Call:
    """A function that a pickle may call. The pickle can change this object, and so never the function itself."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Inert(pickle.Unpickler):
    """Unpickler that builds descriptions of tensors, and calls nothing that a file chooses."""

    def __init__(self, stream: BinaryIO, file: Path):
        super().__init__(stream, encoding="utf-8")
        self._file = file
        self.dtypes: dict[str, str] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CALLED:
            return _Call(_CALLED[module, name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and name == _UNTYPED:
            return _UNTYPED
        raise RequestError(
            f"{self._file.name} asks for {module}.{name} when it is unpickled, which is never run; expected tensors alone. "
            "Do not load the file by other means; give a checkpoint in safetensors."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it refers to {kind!r} where storages were expected")
        if dtype != _UNTYPED:
            self.dtypes[key] = dtype
        return _Storage(key, None if dtype == _UNTYPED else dtype)


def _stored(name: Any, view: Any, storages: dict[str, _Span], file: Path) -> StoredTensor:
    """Return the position of a tensor, after checking that all its bytes are there."""
    if not isinstance(name, str) or not isinstance(view, _View) or view.storage.dtype not in ITEM_BYTES:
        raise pickle.UnpicklingError(f"{name!r} is {_kind(view)} instead of a tensor")
    counts = (view.offset, *view.shape, *view.strides)
    if len(view.shape) != len(view.strides) or not all(type(count) is int and count >= 0 for count in counts):
        raise pickle.UnpicklingError(f"{name!r} has a malformed shape")
    following = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != following:
            raise RequestError(
                f"{name} is stored in {file.name} with strides {list(view.strides)}; expected its elements one after another. "
                "Load the model with transformers and save it again, as safetensors."
            )
        following *= size
    span, item_bytes = storages[view.storage.key], ITEM_BYTES[view.storage.dtype]
    start = span.start + view.offset * item_bytes
    if math.prod(view.shape) and start + math.prod(view.shape) * item_bytes > span.end:
        raise pickle.UnpicklingError(f"{name!r} reaches beyond its storage")
    return StoredTensor(view.storage.dtype, tuple(view.shape), file, start)


def _span(stream: BinaryIO, entry: zipfile.ZipInfo) -> _Span:
    """Return the position of an entry's bytes, which its local header precedes."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise zipfile.BadZipFile(f"its entry {entry.filename} is compressed")
    stream.seek(max(0, entry.header_offset))
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    span = _Span(entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes, entry.file_size)
    if signature != _LOCAL_SIGNATURE or entry.header_offset < 0 or span.end > stream.seek(0, io.SEEK_END):
        raise zipfile.BadZipFile(f"its entry {entry.filename} is not where its directory says")
    return span


def _bytes_of(stream: BinaryIO, span: _Span) -> bytes:
    stream.seek(span.start)
    return stream.read(span.num_bytes)


def _kind(value: object) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def _unsound(file: Path, reason: str) -> RequestError:
    return RequestError(f"{file.name} is not a sound file of PyTorch weights: {reason}. Download or save it again.")
