"""Execute recipes: stream tensors from the base's shards into new ones."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from upscalers.engine.errors import RequestError
from upscalers.engine.recipes import Copy, Recipe
from upscalers.engine.safetensors_format import TORCH_NAMES, StoredTensor, copy_bytes, layout, write_all

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 25
_SYNC_BYTES = 1 << 28


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write.

    Args:
        name: Full name.
        recipe: How it comes to be.
        dtype: The container's name of the dtype it is written in.
    """

    name: str
    recipe: Recipe
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return StoredTensor(self.dtype, self.recipe.shape).num_bytes


@dataclass(frozen=True)
class Written:
    """What was done.

    Args:
        bytes_read: From the base.
        bytes_written: To the output, headers included.
    """

    bytes_read: int
    bytes_written: int


def split_shards(tensors: Sequence[OutputTensor], max_shard_bytes: int) -> dict[str, list[OutputTensor]]:
    """Assign tensors, in order, to as few files as the limit allows; a larger tensor has a file of its own."""
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


class CheckpointWriter:
    """Write a checkpoint's tensors, holding at most what one recipe reads.

    Tensors that are copied as they are go from file to file inside the kernel. The others follow after all copies, so
    that whatever they need imported can be imported meanwhile.

    Args:
        sources: The base's tensors, by full name.
        scan: Whether to look at every value that is copied and refuse NaN.
        progress: Called with the number of bytes that were just written.
    """

    def __init__(self, sources: dict[str, StoredTensor], scan: bool, progress: Callable[[int], None] = lambda _: None):
        self._sources = sources
        self._scan = scan
        self._progress = progress
        self._bytes_read = 0
        self._open_files: dict[Path, int] = {}

    def write(self, folder: Path, shards: dict[str, list[OutputTensor]]) -> Written:
        """Write all shards, and the index if there are several.

        Args:
            folder: An existing folder.
            shards: As `split_shards` gives them.

        Raises:
            RequestError: If a value is NaN, or does not fit the output's dtype.
            OSError: If reading or writing fails.
        """
        bytes_written = 0
        later: list[tuple[int, int, OutputTensor]] = []
        with contextlib.ExitStack() as stack, _SyncAhead() as sync_ahead:
            stack.callback(self._close_files)
            for file_name, tensors in shards.items():
                head, starts = layout([(tensor.name, tensor.dtype, tensor.recipe.shape) for tensor in tensors])
                target = os.open(folder / file_name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                stack.callback(os.close, target)
                write_all(target, head, 0)
                bytes_written += len(head) + sum(tensor.num_bytes for tensor in tensors)
                for tensor in tensors:
                    if isinstance(tensor.recipe, Copy):
                        self._copy(tensor, tensor.recipe.source, target, starts[tensor.name])
                        sync_ahead.wrote(target, tensor.num_bytes)
                    else:
                        later.append((target, starts[tensor.name], tensor))
            for target, start, tensor in later:
                self._build(tensor, target, start)
        if len(shards) > 1:
            self._write_index(folder, shards)
        return Written(self._bytes_read, bytes_written)

    def _copy(self, tensor: OutputTensor, source_name: str, target: int, start: int) -> None:
        source = self._sources[source_name]
        file = self._file_of(source)
        if source.dtype == tensor.dtype and not (self._scan and source.dtype in TORCH_NAMES):
            copy_bytes(file, source.start, target, start, source.num_bytes)
        else:
            position = start
            for chunk in self._read_chunks(source):
                if self._scan:
                    _refuse_nan(chunk, source_name)
                data = _to_bytes(chunk, tensor)
                write_all(target, data, position)
                position += len(data)
        self._bytes_read += source.num_bytes
        self._progress(tensor.num_bytes)

    def _build(self, tensor: OutputTensor, target: int, start: int) -> None:
        built = tensor.recipe.build(self._read)
        assert tuple(built.shape) == tuple(tensor.recipe.shape), (tensor.name, built.shape)
        write_all(target, _to_bytes(built, tensor), start)
        self._progress(tensor.num_bytes)

    def _read(self, name: str) -> "torch.Tensor":
        import torch

        source = self._sources[name]
        chunks = list(self._read_chunks(source))
        self._bytes_read += source.num_bytes
        return torch.cat(chunks).view(source.shape) if chunks else torch.empty(source.shape)

    def _read_chunks(self, source: StoredTensor) -> Iterator["torch.Tensor"]:
        import torch

        file, dtype = self._file_of(source), getattr(torch, TORCH_NAMES[source.dtype])
        position, end = source.start, source.start + source.num_bytes
        while position < end:
            data = bytearray(os.pread(file, min(_CHUNK_BYTES, end - position), position))
            if len(data) % dtype.itemsize or not data:
                raise OSError(f"the base file ended {end - position - len(data)} bytes early")
            yield torch.frombuffer(data, dtype=dtype)
            position += len(data)

    def _file_of(self, source: StoredTensor) -> int:
        assert source.file is not None
        if source.file not in self._open_files:
            self._open_files[source.file] = os.open(source.file, os.O_RDONLY)
        return self._open_files[source.file]

    def _close_files(self) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)
        self._open_files.clear()

    @staticmethod
    def _write_index(folder: Path, shards: dict[str, list[OutputTensor]]) -> None:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for shard in shards.values() for tensor in shard)},
            "weight_map": {tensor.name: file_name for file_name, shard in shards.items() for tensor in shard},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


class _SyncAhead:
    """Start writing dirty pages to the disk while the copy goes on, so that little is left to wait for at the end."""

    def __init__(self) -> None:
        self._pending = 0
        self._target: int | None = None
        self._wake = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def wrote(self, target: int, num_bytes: int) -> None:
        self._pending += num_bytes
        if self._pending >= _SYNC_BYTES:
            self._pending, self._target = 0, target
            self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._done:
                return
            if self._target is not None:
                os.fdatasync(self._target)

    def __enter__(self) -> "_SyncAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True
        self._wake.set()
        self._thread.join()


def _refuse_nan(values: "torch.Tensor", name: str) -> None:
    if values.isnan().any():
        raise RequestError(
            f"{name} holds NaN; expected finite weights. Repair the base, or pass --allow-nan to go on."
        )


def _to_bytes(values: "torch.Tensor", tensor: OutputTensor) -> memoryview:
    import torch

    dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
    cast = values.to(dtype).contiguous()
    if dtype == torch.float16 and values.dtype != torch.float16 and (cast.isinf() & ~values.isinf()).any():
        raise RequestError(
            f"{tensor.name} holds {values.abs().max().item():.3g}, which float16 cannot; expected at most 65504. "
            "Use --dtype bfloat16 or float32."
        )
    return memoryview(cast.flatten().view(torch.uint8).numpy())
