"""Weights in a folder: the files that transformers would load, positions of tensors, and digests.

Shards are written one tensor at a time, and tensors read by position; the safetensors library needs all in memory.
"""

import errno
import hashlib
import json
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import INDEX_FILE, SINGLE_FILE, parse_json
from upscalers.request import one_line

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGER_NAMES = {"I64": "int64"}
INTEGERS = "I64"
SAFETENSORS_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_METADATA = "__metadata__"
_CHUNK_BYTES = 1 << 20
_NOT_IN_KERNEL = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's dtype as safetensors names it, shape, file (None if only planned) and first byte."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def chunks(self, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
        assert self.file is not None
        with self.file.open("rb") as file:
            file.seek(self.start)
            for left in range(self.num_bytes, 0, -size):
                data = file.read(min(size, left))
                if len(data) < min(size, left):
                    raise OSError(f"{self.file.name} ended {left - len(data)} bytes early")
                yield data

    def has_same_bytes(self, other: "StoredTensor") -> bool:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(first == second for first, second in zip(self.chunks(), other.chunks(), strict=True))


def read_tensor(stored: StoredTensor, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Read a tensor, and cast it unless it holds integers; by default it keeps its dtype."""
    import torch

    tensor = torch.empty(stored.shape, dtype=getattr(torch, (TORCH_NAMES | INTEGER_NAMES)[stored.dtype]))
    view = tensor.view(-1).view(torch.uint8).numpy().data
    position = 0
    for data in stored.chunks():
        view[position : position + len(data)] = data
        position += len(data)
    return tensor if dtype is None or stored.dtype in INTEGER_NAMES else tensor.to(dtype)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file; refuse one that safetensors finds invalid or truncated."""
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
    """Return a file's header (name, dtype, shape), and positions, wide dtypes first."""
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
    """Copy a range between two open files inside the kernel, or through a buffer where it cannot."""
    in_kernel = hasattr(os, "copy_file_range")
    while num_bytes:
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, min(1 << 26, num_bytes), source_start, target_start)
            except OSError as error:
                if error.errno in _NOT_IN_KERNEL:
                    in_kernel = False
                    continue
                raise
        else:
            data = os.pread(source, min(_CHUNK_BYTES, num_bytes), source_start)
            write_all(target, data, target_start)
            copied = len(data)
        if copied == 0:
            raise OSError(f"the base file ended {num_bytes} bytes early")
        source_start += copied
        target_start += copied
        num_bytes -= copied


def write_all(target: int, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, start)
        view = view[written:]
        start += written


def most_common_dtype(tensors: Iterable[Any]) -> str:
    """Return the floating-point dtype that most bytes of the tensors have, as safetensors names it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in TORCH_NAMES:
            sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0]


def stored_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    """Return a checkpoint's tensors by stored name; None if there are no weights and none are needed."""
    if (folder / SINGLE_FILE).is_file():  # transformers prefers the single file where both exist
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _indexed_tensors(folder, needs_weights)
    if not needs_weights:
        return None
    raise RequestError(missing_weights(str(folder), (path.name for path in folder.iterdir())))


def missing_weights(base: str, files: Iterable[str]) -> str:
    """Return the message about a base, a folder or hub id, without weights that can be read."""
    weights = (file for file in sorted(files) if file.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")))
    held = next((file for file in weights if file != "training_args.bin"), "no weights")
    remedy = "Give a checkpoint that transformers loads."
    if held.endswith(".bin"):
        remedy = (
            f"Write safetensors first, in Python: AutoModelForCausalLM.from_pretrained({base!r}).save_pretrained('base'), and its "
            "AutoTokenizer likewise."
        )
    return f"{base!r} holds {held}; expected {SINGLE_FILE} or an index of shards, {INDEX_FILE}. {remedy}"


def _indexed_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    """Return the tensors of a shard index; None if a shard is missing and weights are not needed."""
    index_path = folder / INDEX_FILE
    try:
        weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{index_path.name} is not a shard index ({type(error).__name__}: {error}). Download or save it again."
        ) from None
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise RequestError(
                f"{index_path.name} names the shard {name!r}; expected a .safetensors file in the same folder."
            )
        if not (folder / name).is_file() and not needs_weights:
            return None
        headers[name] = read_header(folder / name) if (folder / name).is_file() else {}
    for name, file in weight_map.items():
        if name not in headers[str(file)]:
            raise RequestError(
                f"{index_path.name} places {name} in {file}, which is missing or does not hold it. Download or save the base again."
            )
    # transformers also loads tensors that the files hold but the index omits.
    forgotten = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return {**forgotten, **{name: headers[str(file)][name] for name, file in weight_map.items()}}


def content_sha256(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of a whole checkpoint from the digests of its tensors by name, in any order."""
    lines = (f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class TensorDigests:
    """Threads that compute the SHA-256 of dtype, shape and bytes of tensors."""

    def __init__(self, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]):
        self._tensors = tensors
        self._names = names
        self._futures: dict[str, Future[str]] = {}
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(thread_name_prefix="digest")

    def __enter__(self) -> "TensorDigests":
        return self

    def add(self, name: str) -> None:
        """Start hashing a tensor, ideally after other code has read it; skip others than `names`."""
        if name in self._names and name not in self._futures:
            self._futures[name] = self._pool.submit(self._digest, self._tensors[name])

    def finish(self) -> dict[str, str]:
        for name in self._names:
            self.add(name)
        return dict(sorted((self._names[name], future.result()) for name, future in self._futures.items()))

    def _digest(self, tensor: StoredTensor) -> str:
        digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}\n".encode())
        for data in tensor.chunks():
            if self._stopped.is_set():
                break
            digest.update(data)
        return digest.hexdigest()

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
