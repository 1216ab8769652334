"""The container and the writer: what the library reads and writes, and what recipes say."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.upscalers.checkpoints import Recorder
from tests.upscalers.contents import read_tensors
from upscalers.checkpoint.safetensors_format import copy_bytes, layout, read_header, write_all
from upscalers.request import Progress
from upscalers.tensors.recipes import Combine, Copy, Fill, Initialise, RowRange, Rows
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, split_shards

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TENSORS = st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple))


@settings(max_examples=60)
@given(st.dictionaries(st.text(min_size=1, max_size=8), TENSORS, min_size=1, max_size=6))
def test_files_equal_those_of_safetensors(tmp_path_factory, tensors):
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


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
# The library checks the rest in the same call.
UNSOUND = {
    "no bytes": b"", "length beyond the file": struct.pack("<Q", 2**63) + b"{}", "header not JSON": b"{",
    "header of endless lists": b"[" * 100_000, "too few bytes for the shape": {"a": {**ENTRY, "data_offsets": [0, 4]}},
    "cut": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}},
}  # fmt: skip


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_file_is_refused(tmp_path, case):
    header, path = UNSOUND[case], tmp_path / "model.safetensors"
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    is_whole_file = case in ("no bytes", "length beyond the file")
    path.write_bytes(encoded if is_whole_file else struct.pack("<Q", len(encoded)) + encoded + bytes(8))
    with pytest.raises(ValueError, match=r"model.safetensors is not .*header.*; it may be truncated\. Download"):
        read_header(path)
    with pytest.raises((SafetensorError, OverflowError)):
        load_file(path)


# Numbers of errors stand for: not between these files.
@pytest.mark.parametrize("kernel", ["copies", "has no such call", 18, 95])
def test_bytes_are_copied_with_and_without_the_kernel(tmp_path, monkeypatch, kernel):
    data = os.urandom(1_000_000)
    (tmp_path / "source").write_bytes(data)
    if kernel == "has no such call":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif kernel != "copies":
        refuse_to_copy(monkeypatch, kernel)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
        copy_bytes(source.fileno(), 1000, target.fileno(), 50, 700_000)
        assert target.read() == bytes(50) + data[1000:701_000]
        with pytest.raises(OSError, match="the base file ended 1 bytes early"):
            copy_bytes(source.fileno(), 0, target.fileno(), 0, 1_000_001)
        refuse_to_copy(monkeypatch, 28)  # a full disk is not taken for a kernel that cannot copy
        with pytest.raises(OSError, match="refused"):
            copy_bytes(source.fileno(), 0, target.fileno(), 0, 100)


def refuse_to_copy(monkeypatch, error_number):
    def refuse(*_):
        raise OSError(error_number, "refused")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)


RANGES = (RowRange("c", 1, 2), RowRange(None, 0, 1), RowRange("a", 4, 1), RowRange("c", 0, 1))


@pytest.mark.parametrize("chunk", [2, 10, 1 << 20])
@pytest.mark.parametrize("scan", [True, False])
def test_recipes_write_their_tensors(tmp_path, monkeypatch, scan, chunk):
    monkeypatch.setattr("upscalers.tensors.writer._CHUNK_ELEMENTS", chunk)
    a, b, c, steps = torch.randn(7, 3), torch.randn(7, 3).bfloat16(), torch.randn(4, 3), torch.arange(5)
    sources = {"a": a, "b": b, "c": c, "steps": steps}
    save_file(sources, tmp_path / "source.safetensors")

    def uniform(tensor, generator):
        tensor.uniform_(generator=generator)

    rows = torch.cat([c[1:3], torch.zeros(1, 3), a[4:5], c[:1]])
    random = torch.rand(6, 2, generator=torch.Generator().manual_seed(3))
    cases = {
        "copy": (Copy((7, 3), "a"), "F32", a),
        "cast": (Copy((7, 3), "a"), "BF16", a.bfloat16()),
        "wider": (Copy((7, 3), "b"), "F32", b.float()),
        "steps": (Copy((5,), "steps"), "I64", steps),
        "fill": (Fill((4,), 2.5), "F16", torch.full((4,), 2.5, dtype=torch.float16)),
        "mean": (Combine((7, 3), (("a", 0.5), ("b", 0.5))), "F32", (a + b.float()) / 2),
        "doubled": (Combine((7, 3), (("b", 2.0),)), "F32", b.float() * 2),
        "fresh": (Initialise((6, 2), uniform, seed=3), "F32", random),
        "rows": (Rows((5, 3), RANGES), "F32", rows),
        "rounded rows": (Rows((5, 3), RANGES), "BF16", rows.bfloat16()),
    }
    outputs = [OutputTensor(name, recipe, dtype) for name, (recipe, dtype, _) in cases.items()]
    (tmp_path / "out").mkdir()
    progress = Recorder()
    writer = CheckpointWriter(read_header(tmp_path / "source.safetensors"), scan=scan, progress=progress)
    written, results = writer.write(tmp_path / "out", split_shards(outputs, 200)), read_tensors(tmp_path / "out")
    assert torch.equal(Rows((5, 3), RANGES).build(sources.__getitem__), rows)
    assert results.keys() == cases.keys()
    assert all(torch.equal(results[name], value) for name, (_, _, value) in cases.items())
    ((_, announced, told),) = progress.stages
    assert announced == sum(told) == sum(value.nbytes for _, _, value in cases.values())
    # Only rows are copied, and those of zeros read from nowhere; for a scan or another dtype whole sources are read.
    whole = a.nbytes + 2 * c.nbytes
    read_for_rows = whole + (whole if scan else 4 * 3 * 4)
    assert written.bytes_read == read_for_rows + 3 * a.nbytes + 3 * b.nbytes + steps.nbytes


def test_overflowing_sum_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "source.safetensors")
    (tmp_path / "out").mkdir()
    writer = CheckpointWriter(read_header(tmp_path / "source.safetensors"), scan=False, progress=Progress())
    shards = split_shards([OutputTensor("large", Combine((3,), (("a", 1e39),)), "F32")], 200)
    with pytest.raises(ValueError, match="large came out as NaN or infinite"):
        writer.write(tmp_path / "out", shards)


def test_tensors_are_split_into_shards():
    sizes = {"a": 5, "b": 5, "c": 30, "d": 2, "e": 2}
    tensors = [OutputTensor(name, Fill((size,), 0), "F32") for name, size in sizes.items()]
    shards = split_shards(tensors, 40)
    assert [[tensor.name for tensor in shard] for shard in shards.values()] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(shards) == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert list(split_shards(tensors, 10_000)) == ["model.safetensors"]
