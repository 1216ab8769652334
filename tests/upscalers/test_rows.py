"""Tensors put together from rows: copied by the writer as bytes, or built where a dtype changes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from upscalers.checkpoint.safetensors_format import read_header
from upscalers.tensors.recipes import RowRange, Rows
from upscalers.tensors.writer import CheckpointWriter, OutputTensor

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
    writer.write(tmp_path, {"model.safetensors": [OutputTensor("c", Rows((5, 3), RANGES), dtype)]})
    written = load_file(tmp_path / "model.safetensors")["c"]
    assert written.dtype == torch_dtype
    assert torch.equal(written, expected(sources).to(torch_dtype))


def test_bytes_are_counted_without_rows_of_zeros(tmp_path, sources):
    writer = CheckpointWriter(read_header(tmp_path / "sources.safetensors"), scan=False)
    written = writer.write(tmp_path, {"model.safetensors": [OutputTensor("c", Rows((5, 3), RANGES), "F32")]})
    assert written.bytes_read == 4 * 3 * 4


def test_a_recipe_builds_what_the_writer_copies(sources):
    assert torch.equal(Rows((5, 3), RANGES).build(sources.__getitem__), expected(sources))


def test_ranges_that_do_not_make_up_the_output_are_a_mistake():
    with pytest.raises(AssertionError):
        Rows((4, 3), RANGES)


def test_rows_beyond_the_source_are_a_mistake(tmp_path, sources):
    writer = CheckpointWriter(read_header(tmp_path / "sources.safetensors"), scan=False)
    with pytest.raises(AssertionError):
        writer.write(tmp_path, {"model.safetensors": [OutputTensor("c", Rows((2, 3), (RowRange("b", 3, 2),)), "F32")]})
