"""Layers that predict further tokens stand behind the last layer of the base, and behind that of the result."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from midus_hf.models.inference.tiny import tiny_model
from tests.upscalers.checkpoints import (
    config_of,
    edit_config,
    load,
    read_tensors,
    same_bits,
    same_tensors,
    write_tensors,
)
from tests.upscalers.methods import SMALL_CHAPTERS
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

LAYERS = 4
PREDICTING = ("enorm.weight", "shared_head.head.weight", "mlp.experts.3.up_proj.weight")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Return the folder of a tiny GLM-4.5 with one layer that predicts a further token."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("glm4_moe", num_hidden_layers=LAYERS).save_pretrained(folder)
    edit_config(folder, num_nextn_predict_layers=1)
    tensors = {f"model.layers.{LAYERS}.{name}": torch.full((2, 3), float(i)) for i, name in enumerate(PREDICTING)}
    write_tensors(folder, read_tensors(folder) | tensors)
    return folder


@pytest.mark.parametrize(
    ("method", "options"),
    [("moc", SMALL_CHAPTERS), ("solar", {}), ("llama-pro", {}), ("midus-hml", {"n": 8, "k": 3})],
)
def test_they_are_carried_along_behind_the_last_layer_and_come_back(method, options, base, tmp_path):
    report = upscale(base=base, method=method, output=tmp_path / "out", options=options)
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    for name in PREDICTING:
        moved = after[f"model.layers.{report.num_layers}.{name}"]
        assert same_bits(moved, before[f"model.layers.{LAYERS}.{name}"])
    if method == "solar":  # drops layers of the base, which nothing brings back
        return
    tokens = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(tokens).logits, load(base)(tokens).logits)
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)


def test_a_layer_more_than_the_config_says_is_refused(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    write_tensors(folder, {**read_tensors(folder), f"model.layers.{LAYERS + 1}.enorm.weight": torch.zeros(2)})
    message = f"layers.{LAYERS + 1}.enorm.weight, but config.json has num_hidden_layers = {LAYERS} and num_nextn_predict_layers = 1"
    with pytest.raises(RequestError, match=re.escape(message)):
        upscale(base=folder, method="llama-pro", output=tmp_path / "out")
