"""Writer that executes recipes: it streams tensors from the base's shards into new shards."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import INDEX_FILE, SINGLE_FILE
from upscalers.checkpoint.safetensors_format import (
    INTEGER_NAMES,
    TORCH_NAMES,
    StoredTensor,
    copy_bytes,
    layout,
    write_all,
)
from upscalers.request import Progress
from upscalers.tensors.recipes import (
    Built,
    Combine,
    Copy,
    Elementwise,
    Fill,
    Measurement,
    Recipe,
    Rows,
    Scratch,
    Solver,
    SolverTensor,
    solved_parts,
)

if TYPE_CHECKING:
    import torch

_CHUNK_ELEMENTS = 1 << 20
_DEFAULT_SHARD_BYTES = 5 * 10**9
_SCRATCH = ".scratch"
_HELD = ("holds NaN or infinite values", "Repair the base, or pass --no-verify to go on.")
_READ = ("holds NaN or infinite values, and new weights are computed from it", "Repair the base.")
_MADE = (
    "came out as NaN or infinite, although its sources are finite",
    "Lower the factors or the learning rate for it.",
)


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: full name, recipe, and dtype, as safetensors names it."""

    name: str
    recipe: Recipe
    dtype: str

    @property
    def num_bytes(self) -> int:
        return StoredTensor(self.dtype, self.recipe.shape).num_bytes


@dataclass(frozen=True)
class WriteSummary:
    """The bytes that a writer read and wrote, with headers, and solvers' measurements by layer."""

    bytes_read: int
    bytes_written: int
    measurements: list[Measurement]


def in_file_order(outer: Sequence[OutputTensor], layers: Iterable[OutputTensor]) -> list[OutputTensor]:
    """Return tensors in the order of use: embeddings, layers, then others."""
    embeddings = [tensor for tensor in outer if "embed" in tensor.name]
    return [*embeddings, *layers, *(tensor for tensor in outer if "embed" not in tensor.name)]


def split_shards(
    tensors: Sequence[OutputTensor], max_shard_bytes: int = _DEFAULT_SHARD_BYTES
) -> dict[str, list[OutputTensor]]:
    """Assign tensors in order to as few files as `max_shard_bytes` allows; a larger one gets its own."""
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


class CheckpointWriter:
    """Writer of tensors with at most what one recipe reads in memory; with `scan`, it refuses NaN."""

    def __init__(
        self,
        sources: dict[str, StoredTensor],
        scan: bool,
        progress: Progress | None = None,
        copied: Callable[[str], None] = lambda name: None,
        stored_name: Callable[[str], str] = lambda name: name,
    ):
        self._sources = sources
        self._scan = scan
        self._progress = progress or Progress()
        self._copied = copied
        self._stored_name = stored_name
        self._bytes_read = 0

    def write(self, folder: Path, shards: dict[str, list[OutputTensor]]) -> WriteSummary:
        """Write shards, tensors by file name, into a folder, with an index unless there is a single one."""
        bytes_written = 0
        placed: list[_Placement] = []
        for file_name, tensors in shards.items():
            named = [(self._stored_name(each.name), each.dtype, each.recipe.shape) for each in tensors]
            head, starts = layout(named)
            num_bytes = len(head) + sum(tensor.num_bytes for tensor in tensors)
            with _open_file(folder / file_name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as target:
                write_all(target, head, 0)
                os.ftruncate(target, num_bytes)
            bytes_written += num_bytes
            placed += [
                _Placement(tensor, folder / file_name, starts[self._stored_name(tensor.name)]) for tensor in tensors
            ]
        solved = [part for one in placed for part in one.parts()]
        others = [one for one in placed if not solved_parts(one.tensor.recipe)]
        num_bytes = sum(one.tensor.num_bytes for one in others)
        unit = "shards" if len(shards) > 1 else "shard"
        self._progress.stage(f"writing {len(shards)} {unit}", num_bytes, "bytes")
        for one in others:
            with _open_file(one.file, os.O_RDWR) as target:
                self._make(one.tensor, target, one.start)
            self._progress.advance(one.tensor.num_bytes)
        measurements = self._solve(solved, folder)
        if set(shards) != {SINGLE_FILE}:
            sizes = sum(tensor.num_bytes for shard in shards.values() for tensor in shard)
            places = {self._stored_name(each.name): file for file, shard in shards.items() for each in shard}
            index = {"metadata": {"total_size": sizes}, "weight_map": places}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / INDEX_FILE).write_text(text, encoding="utf-8")
        return WriteSummary(self._bytes_read, bytes_written, measurements)

    def _solve(self, placed: "list[_Placement]", folder: Path) -> list[Measurement]:
        """Write the tensors of solvers, one solver after another; return measurements by layer."""
        if not placed:
            return []
        import torch

        wanted: dict[tuple[Solver, str], list[_Placement]] = {}
        for one in placed:
            assert isinstance(one.tensor.recipe, SolverTensor)
            wanted.setdefault((one.tensor.recipe.solver, one.tensor.recipe.key), []).append(one)
        solvers = list(dict.fromkeys(solver for solver, _ in wanted))
        scratch = Scratch(self._read, folder / _SCRATCH, self._progress)
        scratch.folder.mkdir()
        threads = torch.get_num_threads()
        try:
            for solver in solvers:
                torch.set_num_threads(solver.threads or threads)
                for key, values in solver.solve(scratch):
                    for one in wanted.pop((solver, key)):
                        assert tuple(values.shape) == tuple(one.tensor.recipe.shape), (one.tensor.name, values.shape)
                        _refuse_not_finite(values, one.tensor.name, *_MADE)
                        with _open_file(one.file, os.O_RDWR) as target:
                            write_all(target, _to_bytes(values, one.tensor), one.start)
        finally:
            torch.set_num_threads(threads)
        assert not wanted, sorted(key for _, key in wanted)
        shutil.rmtree(scratch.folder)
        rows = [row for solver in solvers for row in solver.measurements]
        return sorted(rows, key=lambda row: row["layer"])

    def _make(self, tensor: OutputTensor, target: int, start: int) -> None:
        """Write one tensor's bytes to an open file."""
        recipe = tensor.recipe
        if self._goes_through_kernel(tensor):
            self._copy_in_kernel(tensor, target, start)
        elif isinstance(recipe, Elementwise):
            self._combine(tensor, recipe, target, start)
        else:
            assert isinstance(recipe, Built), tensor.name
            built = recipe.build(self._read)
            assert tuple(built.shape) == tuple(recipe.shape), (tensor.name, built.shape)
            write_all(target, _to_bytes(built, tensor), start)
        if isinstance(recipe, Copy):
            self._copied(recipe.source)

    def _goes_through_kernel(self, tensor: OutputTensor) -> bool:
        if isinstance(tensor.recipe, Fill) and tensor.recipe.value == 0:
            return True
        if not isinstance(tensor.recipe, Copy | Rows):
            return False
        dtypes = {self._sources[name].dtype for name in tensor.recipe.sources}
        return dtypes <= {tensor.dtype} and not (self._scan and tensor.dtype in TORCH_NAMES)

    def _copy_in_kernel(self, tensor: OutputTensor, target: int, start: int) -> None:
        """Copy a tensor, or its rows, from file to file; of zeros nothing is written, since a hole reads as zeros."""
        recipe = tensor.recipe
        if isinstance(recipe, Copy):
            source = self._sources[recipe.source]
            assert source.shape == recipe.shape, (tensor.name, recipe.shape)
            self._copy_bytes(source, 0, target, start, tensor.num_bytes)
        if not isinstance(recipe, Rows):
            return
        for rows in recipe.ranges:
            row_bytes = tensor.num_bytes // recipe.shape[0]
            if rows.source is not None:
                source = self._sources[rows.source]
                assert 0 <= rows.first <= rows.first + rows.count <= source.shape[0], (rows, source.shape)
                assert source.num_bytes == row_bytes * source.shape[0], (rows, source.shape)
                self._copy_bytes(source, rows.first * row_bytes, target, start, rows.count * row_bytes)
            start += rows.count * row_bytes

    def _copy_bytes(self, source: StoredTensor, first: int, target: int, start: int, num_bytes: int) -> None:
        assert source.file is not None
        with source.file.open("rb", buffering=0) as file:
            copy_bytes(file.fileno(), source.start + first, target, start, num_bytes)
        self._bytes_read += num_bytes

    def _combine(self, tensor: OutputTensor, recipe: Elementwise, target: int, start: int) -> None:
        """Read chunks of all operands, and write what is made of them."""
        sources = [self._sources[name] for name in recipe.operands]
        assert all(source.shape == recipe.shape for source in sources), tensor.name
        for chunks in zip(*map(self._read_chunks, sources), strict=True):
            if self._scan:
                for chunk, name in zip(chunks, recipe.operands, strict=True):
                    _refuse_not_finite(chunk, name, *_HELD)
            values = recipe.combine(*chunks)
            if isinstance(recipe, Combine) and all(chunk.isfinite().all() for chunk in chunks):
                _refuse_not_finite(values, tensor.name, *_MADE)
            data = _to_bytes(values, tensor)
            write_all(target, data, start)
            start += len(data)

    def _read(self, name: str) -> "torch.Tensor":
        import torch

        source = self._sources[name]
        chunks = list(self._read_chunks(source))
        for chunk in chunks:
            _refuse_not_finite(chunk, name, *_READ)
        return torch.cat(chunks).view(source.shape) if chunks else torch.empty(source.shape)

    def _read_chunks(self, source: StoredTensor) -> Iterator["torch.Tensor"]:
        import torch

        dtype = getattr(torch, TORCH_NAMES[source.dtype])
        for data in source.chunks(_CHUNK_ELEMENTS * dtype.itemsize):
            self._bytes_read += len(data)
            yield torch.frombuffer(bytearray(data), dtype=dtype)


@dataclass(frozen=True)
class _Placement:
    """A tensor that is still to be made, with the file and position of its bytes."""

    tensor: OutputTensor
    file: Path
    start: int

    def parts(self) -> "Iterator[_Placement]":
        start = self.start
        for recipe in solved_parts(self.tensor.recipe):
            part = OutputTensor(self.tensor.name, recipe, self.tensor.dtype)
            yield _Placement(part, self.file, start)
            start += part.num_bytes


@contextlib.contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_not_finite(values: "torch.Tensor", name: str, what: str, remedy: str) -> None:
    if not values.isfinite().all():
        raise RequestError(f"{name} {what}; expected finite weights. {remedy}")


def _to_bytes(values: "torch.Tensor", tensor: OutputTensor) -> memoryview:
    import torch

    dtype = getattr(torch, (TORCH_NAMES | INTEGER_NAMES)[tensor.dtype])
    cast = values.to(dtype).contiguous()
    if dtype != values.dtype and (cast.isinf() & ~values.isinf()).any():
        largest = values[values.isfinite()].abs().max().item()
        raise RequestError(
            f"{tensor.name} holds {largest:.4g}, which {TORCH_NAMES[tensor.dtype]} cannot; expected at most "
            f"{torch.finfo(dtype).max:g}. Use a wider --dtype."
        )
    return cast.flatten().view(torch.uint8).numpy().data
