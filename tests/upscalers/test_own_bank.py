"""A memory with a bank is its folder and its method: all else takes every bank along."""

import pytest
import torch

from midus_hf.memories.registry import MEMORY_TYPES
from tests.upscalers.checkpoints import save_base
from tests.upscalers.contents import load, logits
from upscalers.edits.checkpoint_edit import files_without_banks
from upscalers.methods.contract import METHODS
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

FILE = "memory_bank/offset/vector.safetensors"


@pytest.fixture(scope="module", autouse=True)
def offset():
    from tests.upscalers.offset import method

    yield method
    del METHODS["offset"], MEMORY_TYPES["offset"]


def test_plugin_bank_travels_with_its_checkpoint(tmp_path):
    base = save_base(tmp_path / "base")
    report = upscale(base=base, method="offset", output=tmp_path / "at_first", options={"layers": [1]})
    assert (report.identity.max_abs_diff, report.parameters.bank) == (0.0, 32)
    model = load(tmp_path / "at_first")
    before = model.model.services["offset"].digest()
    model.model.services["offset"].vectors["offset"] += torch.linspace(-1, 1, 32)
    assert before != model.model.services["offset"].digest()
    with pytest.raises(ValueError, match="has a bank beside its weights, which an upload by Transformers would"):
        model.push_to_hub("me/offset")
    model.save_pretrained(tmp_path / "made")
    (tmp_path / "made" / "upscale.json").write_bytes((tmp_path / "at_first" / "upscale.json").read_bytes())
    model, options = tmp_path / "made", {"layers": [1]}
    content = (model / FILE).read_bytes()
    assert not torch.equal(logits(model), logits(base))
    upscale(base=model, method="llama-pro", output=tmp_path / "deeper", num_new_layers=1)
    assert (tmp_path / "deeper" / FILE).read_bytes() == content
    assert torch.equal(logits(tmp_path / "deeper"), logits(model))
    strip(tmp_path / "deeper", tmp_path / "stripped")
    assert (tmp_path / "stripped" / FILE).read_bytes() == content
    strip(tmp_path / "stripped", tmp_path / "base_again")
    assert not (tmp_path / "base_again" / "memory_bank").exists()
    assert torch.equal(logits(tmp_path / "base_again"), logits(base))
    assert inspect_checkpoint(model)["parameters"]["bank"] == 32
    assert model / FILE not in files_without_banks(model)
    upscale(base=base, method="offset", output=model, options=options, overwrite=True)
    (model / "memory_bank" / "offset" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"files that no checkpoint has, .*: memory_bank/offset/notes.txt; expected"):
        upscale(base=base, method="offset", output=model, options=options, overwrite=True)
    (model / FILE).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"memory_bank/offset/vector.safetensors of .* is a Git LFS pointer"):
        upscale(base=model, method="solar", output=tmp_path / "x")
