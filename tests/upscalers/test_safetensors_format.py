"""The container and the writer: what the library writes is read and the other way round, and recipes give what they say."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from upscalers.checkpoint.safetensors_format import (
    copy_bytes,
    layout,
    read_header,
    write_all,
)
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress
from upscalers.tensors.recipes import Combine, Copy, Fill, Initialise, RowRange, Rows
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, split_shards

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6
    )
)
def test_the_library_reads_what_is_laid_out_and_the_other_way_round(tmp_path_factory, tensors):
    tensors = {name: value for name, value in tensors.items() if name != "__metadata__"}
    folder = tmp_path_factory.mktemp("container")
    values = {name: torch.randn(shape).to(DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    head, starts = layout([(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
    with open(folder / "ours", "wb") as file:
        write_all(file.fileno(), head, 0)
        for name, value in values.items():
            write_all(file.fileno(), memoryview(value.flatten().view(torch.uint8).numpy()), starts[name])
    save_file(values, folder / "theirs")
    for name, value in load_file(folder / "ours").items():
        assert torch.equal(value, values[name])
        assert starts[name] % value.element_size() == 0
    read = read_header(folder / "theirs")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in read.items()} == tensors
    assert read_header(folder / "ours").keys() == values.keys()


def container(path, header, data=b"", length=None):
    """A file with this header, whatever it is."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def entry(start, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


UNSOUND = {
    "no bytes": b"",
    "length beyond the file": struct.pack("<Q", 2**63) + b"{}",
    "header not JSON": b"{",
    "header of noise": b"\xff\xfe\xfd",
    "header of endless digits": b'{"a":' + b"1" * 5000 + b"}",
    "header of endless lists": b"[" * 100_000,
    "header a list": [1],
    "entry a number": {"a": 5},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}},
    "dtype a list": {"a": entry(0, 8, dtype=["F32"])},
    "shape of text": {"a": {"dtype": "F32", "shape": "22", "data_offsets": [0, 8]}},
    "shape below zero": {"a": entry(0, 8, shape=(-1, -2))},
    "shape of truths": {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    "offsets of fractions": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
    "too few bytes for the shape": {"a": entry(0, 4)},
    "end before start": {"a": entry(8, 0)},
    "overlap": {"a": entry(0, 8), "b": entry(4, 12)},
    "gap": {"a": entry(0, 8), "b": entry(12, 20)},
    "cut": {"a": entry(0, 8), "b": entry(8, 16)},
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_file_is_refused_here_as_in_the_library(tmp_path, case):
    header = UNSOUND[case]
    path = tmp_path / "model.safetensors"
    if case in ("no bytes", "length beyond the file"):
        path.write_bytes(header)
    else:
        container(path, header, bytes(8))
    message = r"model.safetensors is not a sound safetensors file: .*header.*; it may be truncated\. Download or save it again"
    with pytest.raises(RequestError, match=message):
        read_header(path)
    with pytest.raises((SafetensorError, OverflowError)):
        load_file(path)


def test_bytes_are_copied_with_and_without_the_kernels_help(tmp_path, monkeypatch):
    data = os.urandom(1_000_000)
    (tmp_path / "source").write_bytes(data)
    for in_kernel in (True, False):
        if not in_kernel:
            monkeypatch.delattr(os, "copy_file_range", raising=False)
        with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
            copy_bytes(source.fileno(), 1000, target.fileno(), 50, 700_000)
            assert target.read() == bytes(50) + data[1000:701_000]
            with pytest.raises(OSError, match="the base file ended 1 bytes early"):
                copy_bytes(source.fileno(), 0, target.fileno(), 0, 1_000_001)


def test_a_full_disk_is_not_taken_for_a_kernel_that_cannot_copy(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(bytes(100))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
        with pytest.raises(OSError, match="No space left"):
            copy_bytes(source.fileno(), 0, target.fileno(), 0, 100)


class CountedBytes(Progress):
    """Adds up what it is told."""

    num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


@pytest.mark.parametrize("chunk", [2, 10, 1 << 20])
@pytest.mark.parametrize("scan", [True, False])
def test_recipes_give_what_they_say_however_little_is_read_at_once(tmp_path, monkeypatch, scan, chunk):
    monkeypatch.setattr("upscalers.tensors.writer._CHUNK_ELEMENTS", chunk)
    sources = {"a": torch.randn(7, 3), "b": torch.randn(7, 3).bfloat16(), "steps": torch.arange(5)}
    save_file(sources, tmp_path / "source.safetensors")
    stored = read_header(tmp_path / "source.safetensors")

    def uniform(tensor, generator):
        tensor.uniform_(generator=generator)

    outputs = [
        OutputTensor("copy", Copy((7, 3), "a"), "F32"),
        OutputTensor("cast", Copy((7, 3), "a"), "BF16"),
        OutputTensor("wider", Copy((7, 3), "b"), "F32"),
        OutputTensor("steps", Copy((5,), "steps"), "I64"),
        OutputTensor("fill", Fill((4,), 2.5), "F16"),
        OutputTensor("mean", Combine((7, 3), (("a", 0.5), ("b", 0.5))), "F32"),
        OutputTensor("doubled", Combine((7, 3), (("b", 2.0),)), "F32"),
        OutputTensor("fresh", Initialise((6, 2), uniform, seed=3), "F32"),
    ]
    (tmp_path / "out").mkdir()
    progress = CountedBytes()
    writer = CheckpointWriter(stored, scan=scan, progress=progress)
    written = writer.write(tmp_path / "out", split_shards(outputs, 200))
    results = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        results.update(load_file(path))
    expected = {
        "copy": sources["a"],
        "cast": sources["a"].bfloat16(),
        "wider": sources["b"].float(),
        "steps": sources["steps"],
        "fill": torch.full((4,), 2.5, dtype=torch.float16),
        "mean": (sources["a"] + sources["b"].float()) / 2,
        "doubled": sources["b"].float() * 2,
        "fresh": torch.rand(6, 2, generator=torch.Generator().manual_seed(3)),
    }
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], value) for name, value in expected.items())
    assert progress.num_bytes == sum(value.nbytes for value in expected.values())
    assert written.bytes_read == 3 * sources["a"].nbytes + 3 * sources["b"].nbytes + sources["steps"].nbytes


@pytest.mark.parametrize("scan", [True, False])
def test_a_sum_of_finite_numbers_that_is_not_finite_is_refused(tmp_path, scan):
    save_file({"a": torch.ones(3)}, tmp_path / "source.safetensors")
    (tmp_path / "out").mkdir()
    writer = CheckpointWriter(read_header(tmp_path / "source.safetensors"), scan=scan, progress=Progress())
    shards = split_shards([OutputTensor("large", Combine((3,), (("a", 1e39),)), "F32")], 200)
    with pytest.raises(RequestError, match="large came out as NaN or infinite, though what it is made from is finite"):
        writer.write(tmp_path / "out", shards)


def test_shards_hold_as_much_as_fits_and_a_large_tensor_has_its_own():
    tensors = [
        OutputTensor(name, Fill((size,), 0), "F32") for name, size in zip("abcde", (5, 5, 30, 2, 2), strict=True)
    ]
    shards = split_shards(tensors, 40)
    assert [[tensor.name for tensor in shard] for shard in shards.values()] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(shards) == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert list(split_shards(tensors, 10_000)) == ["model.safetensors"]


@pytest.mark.parametrize("error_number", [18, 95])
def test_a_kernel_that_cannot_copy_between_these_files_is_done_without(tmp_path, monkeypatch, error_number):
    data = os.urandom(10_000)
    (tmp_path / "source").write_bytes(data)

    def refuse(*_):
        raise OSError(error_number, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
        copy_bytes(source.fileno(), 0, target.fileno(), 0, len(data))
        assert target.read() == data


RANGES = (RowRange("b", 1, 2), RowRange(None, 0, 1), RowRange("a", 4, 1), RowRange("b", 0, 1))


@pytest.fixture
def sources(tmp_path):
    """Two tensors in a file, by name."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(4, 3, generator=generator)}
    save_file(tensors, tmp_path / "sources.safetensors")
    return tensors


def expected(sources):
    return torch.cat([sources["b"][1:3], torch.zeros(1, 3), sources["a"][4:5], sources["b"][:1]])


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_rows_are_written_in_their_order(tmp_path, sources, dtype, torch_dtype):
    writer = CheckpointWriter(read_header(tmp_path / "sources.safetensors"), scan=False)
    written = writer.write(tmp_path, {"model.safetensors": [OutputTensor("c", Rows((5, 3), RANGES), dtype)]})
    tensor = load_file(tmp_path / "model.safetensors")["c"]
    assert tensor.dtype == torch_dtype
    assert torch.equal(tensor, expected(sources).to(torch_dtype))
    # Rows alone are copied, and those of zeros read from nowhere; for another dtype whole sources are read.
    assert dtype != "F32" or written.bytes_read == 4 * 3 * 4


def test_a_recipe_builds_what_the_writer_copies(sources):
    assert torch.equal(Rows((5, 3), RANGES).build(sources.__getitem__), expected(sources))
