"""The safetensors file format: a length, a JSON header, and bytes.

The safetensors library writes a file only from tensors that are all in memory. This module writes shards as a stream,
one tensor at a time, and reads tensors by position, so that a whole shard is never in memory.
"""

import errno
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from midus_hf.config.errors import RequestError
from upscalers.request.errors import one_line

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Integer dtypes that are read, of memories: torch's name by the name in safetensors.
INTEGER_NAMES = {"I64": "int64"}
INTEGERS = "I64"
SAFETENSORS_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_METADATA = "__metadata__"
_CHUNK_BYTES = 1 << 22
_NOT_IN_KERNEL = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY})


@dataclass(frozen=True)
class StoredTensor:
    """Position of a tensor: its dtype, as safetensors names it, shape, file (None if only planned) and first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_tensor(stored: StoredTensor, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Read a tensor, and cast it unless it holds integers; by default it keeps its dtype."""
    import torch

    assert stored.file is not None
    tensor = torch.empty(stored.shape, dtype=getattr(torch, (TORCH_NAMES | INTEGER_NAMES)[stored.dtype]))
    unread, position = tensor.view(-1).view(torch.uint8).numpy().data, stored.start
    with stored.file.open("rb", buffering=0) as file:
        while unread:
            num_bytes = os.preadv(file.fileno(), [unread], position)
            if not num_bytes:
                raise OSError(f"{stored.file.name} ended {len(unread)} bytes early")
            unread, position = unread[num_bytes:], position + num_bytes
    return tensor if dtype is None or stored.dtype in INTEGER_NAMES else tensor.to(dtype)


def holds_the_same(left: StoredTensor, right: StoredTensor) -> bool:
    """Return whether two stored tensors have the same dtype, shape and bytes, reading no further than the first difference."""
    assert left.file is not None and right.file is not None
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with left.file.open("rb", buffering=0) as first, right.file.open("rb", buffering=0) as second:
        for start in range(0, left.num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, left.num_bytes - start)
            if os.pread(first.fileno(), length, left.start + start) != os.pread(
                second.fileno(), length, right.start + start
            ):
                return False
    return True


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the dtype, shape and position of each tensor of a file; refuse one that the library finds invalid or truncated."""
    try:
        with safe_open(file, "np"):  # checks the header and where tensors lie
            pass
    except SafetensorError as error:
        raise RequestError(
            f"{file.name} is not a valid safetensors file: {one_line(error)}; it may be truncated. Download or save it again."
        ) from None
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
    header.pop(_METADATA, None)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in ITEM_BYTES:
            raise RequestError(
                f"{name} in {file.name} is stored as {entry['dtype']}; expected float32, float16 or bfloat16 weights. Start from the "
                "unquantised checkpoint."
            )
        start = 8 + header_bytes + entry["data_offsets"][0]
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), file, start)
    return tensors


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the data of a file of tensors (name, dtype, shape), and positions; wide dtypes come first."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor[1]]):
        num_bytes = StoredTensor(dtype, shape).num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        offsets[name] = position
        position += num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    return struct.pack("<Q", len(encoded)) + encoded, {name: start + offset for name, offset in offsets.items()}


def copy_bytes(source: int, source_start: int, target: int, target_start: int, num_bytes: int) -> None:
    """Copy a range between the descriptors of two open files inside the kernel, or through a buffer where the kernel cannot."""
    chunk = 1 << 26
    in_kernel = hasattr(os, "copy_file_range")
    while num_bytes:
        wanted = min(chunk, num_bytes)
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, wanted, source_start, target_start)
            except OSError as error:
                if error.errno in _NOT_IN_KERNEL:
                    in_kernel = False
                    continue
                raise
        else:
            data = os.pread(source, min(wanted, 1 << 22), source_start)
            write_all(target, data, target_start)
            copied = len(data)
        if copied == 0:
            raise OSError(f"the base file ended {num_bytes} bytes early")
        source_start, target_start, num_bytes = source_start + copied, target_start + copied, num_bytes - copied


def write_all(target: int, data: bytes | memoryview, start: int) -> None:
    """Write all of `data` at the position `start` of a file descriptor."""
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, start)
        view, start = view[written:], start + written


def dtype_of_most(tensors: Iterable[Any]) -> str:
    """Return the floating-point dtype that most bytes of the tensors have, as safetensors names it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in TORCH_NAMES:
            sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0]
