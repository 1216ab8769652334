"""Banks of a checkpoint are rounded to integers, each row by a scale of its own."""

import json

import pytest
import torch

from midus_hf.ops.chapters.quantisation import quantise_rows
from tests.upscalers.checkpoints import config_of, edit_config, read_tensors, same_bits
from tests.upscalers.edits.made import LAYERS, bank_name, save_chapters
from upscalers.edits import quantising
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.request.errors import RequestError


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_and_the_config_follows(tmp_path, chapters, dtype, bits, monkeypatch):
    monkeypatch.setattr(quantising, "_ROWS_AT_ONCE", 5)
    model = save_chapters(tmp_path / "model", dtype)
    done = chapters("quantise", model, "--bits", bits, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    before, after = read_tensors(model), read_tensors(tmp_path / "out")
    integers, scales = quantise_rows(before.pop(bank_name()), bits)
    assert same_bits(after.pop(bank_name() + "_integers"), integers)
    assert same_bits(after.pop(bank_name() + "_scales"), scales)
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    config = config_of(tmp_path / "out")
    assert config["memory"][0]["bank_bits"] == bits
    (edit,) = config["upscale"]["chapter_edits"]
    assert (edit["command"], edit["chapters"], edit["bits"]) == ("quantise", "0-5", bits)


def test_every_bank_is_rounded_in_the_file_that_it_was_in(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="none", sharded=True)
    assert chapters("quantise", model, "--output", tmp_path / "out").status == 0
    before, after = (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for folder in (model, tmp_path / "out")
    )
    for layer in LAYERS:
        name = f"model.layers.{layer}.memories.chapters.bank"
        file = before.pop(name)
        assert [after.pop(f"{name}_{part}") for part in ("integers", "scales")] == [file, file]
    assert before == after


def test_rounded_rows_are_edited_and_not_rounded_again(tmp_path, chapters, checkpoint):
    rounded = tmp_path / "rounded"
    assert chapters("quantise", checkpoint, "--output", rounded).status == 0
    assert chapters("prune", rounded, "--chapters", "2", "--output", tmp_path / "pruned").status == 0
    done = chapters("quantise", rounded, "--bits", "4", "--output", tmp_path / "out")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "memory 'chapters' has bank_bits = 8 already; expected rows that were not rounded" in done.err


def test_one_bank_of_several_is_not_rounded(tmp_path):
    model = save_chapters(tmp_path / "model", share="every:2")
    with pytest.raises(
        RequestError, match=r"bank is 0; expected no single bank to quantise, since the 2 banks of memory"
    ):
        quantising.quantise(EditRequest(model, tmp_path / "out", bank=0))


def test_a_config_without_the_option_is_read(tmp_path, chapters):
    model = save_chapters(tmp_path / "model")
    entry = config_of(model)["memory"][0]
    del entry["bank_bits"]
    edit_config(model, memory=[entry])
    assert chapters("quantise", model, "--output", tmp_path / "out").status == 0
