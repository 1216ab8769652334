"""A model with new memories computes what its base computes, and whatever else it would compute is found before it is there."""

import json

import pytest
import torch
from sites import toy_memory
from sites.cases import SOME, each, everywhere
from tiny import save_tiny_model

from midus_hf.config.declared_tensors import Normal
from tests.upscalers.checkpoints import logits
from upscalers.request.errors import VerificationError
from upscalers.runs.upscale import upscale


@everywhere()
def test_logits_are_those_of_the_base_and_the_config_says_where_memories_are(case, family, shared_base, upscaled):
    folder = upscaled(case, family)
    assert torch.equal(logits(folder), logits(shared_base(family)))
    (entry,) = json.loads((folder / "config.json").read_text())["memory"]
    assert (entry["site"], entry["layers"], entry.get("into", [])) == (case.site, case.layers, case.into)
    assert entry.get("name") == (case.method if case.is_attached else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each(SOME)
def test_the_comparison_finds_no_difference(case, family, dtype, tmp_path):
    base = save_tiny_model(family, tmp_path / "base", dtype)
    report = upscale(base=base, method=case.method, output=tmp_path / "out", options=case.options)
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert torch.equal(logits(tmp_path / "out"), logits(base))


@each(SOME)
def test_values_that_are_not_zero_are_caught(case, family, shared_base, tmp_path, monkeypatch):
    monkeypatch.setattr(toy_memory, "ZEROS", Normal(1e-3))
    with pytest.raises(VerificationError, match="logits differ from the base's by up to"):
        upscale(base=shared_base(family), method=case.method, output=tmp_path / "out", options=case.options)
    assert not (tmp_path / "out").exists()
