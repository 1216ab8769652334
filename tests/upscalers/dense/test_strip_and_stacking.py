"""Dense layers come out again byte for byte, and models that were upscaled are upscaled again."""

from dataclasses import replace

import pytest

from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    RECORD,
    config_of,
    file_digests,
    read_tensors,
    with_memory,
)
from tests.upscalers.dense.layers import layer, same_layers
from tests.upscalers.dense.requests import upscaled
from upscalers.architecture.families import FAMILIES
from upscalers.request.errors import RequestError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip

# Files of an upscaled model that stripping a stacked one does not bring back.
DERIVED = ("README.md", "upscale.json")


@pytest.mark.parametrize(
    ("slices", "lost"),
    [
        ([{"layers": [0, 3]}], "layer 3 as they were"),
        ([{"layers": [1, 3]}, {"layers": [1, 3]}], "layers 0, 3 as they were"),
        ([{"layers": [0, 4], "scale": {"up": 0.5}}], "layers 0, 1, 2, 3 as they were"),
        ([{"layers": [0, 2]}, {"layers": [2, 4], "scale": {"others": 0}}], "layers 2, 3 as they were"),
    ],
    ids=str,
)
def test_layers_that_were_dropped_or_scaled_cannot_come_back(slices, lost, base, tmp_path):
    upscaled(base, tmp_path / "out", "slices", options={"slices": slices})
    message = f"out no longer holds base {lost}; expected all of them. Go back to the base itself."
    with pytest.raises(RequestError, match=message):
        strip(tmp_path / "out", tmp_path / "stripped")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_layer_that_also_stands_there_as_it_was_does_come_back(base, tmp_path):
    slices = [{"layers": [1, 2], "scale": {"up": 0.5}}, {"layers": [2, 4]}, {"layers": [0, 2]}, {"layers": [0, 4]}]
    upscaled(base, tmp_path / "out", "slices", options={"slices": slices})
    result = strip(tmp_path / "out", tmp_path / "stripped")
    assert result["removed_layer_indices"] == [0, 5, 6, 7, 8]
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(base)


def test_inspect_tells_repeats_copies_and_fusions_apart(base, tmp_path):
    told = {}
    for method in ("solar", "llama-pro", "avg-deus", "slices"):
        upscaled(base, tmp_path / method, method)
        rows = inspect_checkpoint(tmp_path / method)["layers"]
        told[method] = {row["index"]: row["from"] for row in rows if row["new"]}
        assert all(row["from"].startswith("base ") for row in rows if not row["new"])
    assert told == {
        "solar": {3: "base 1, repeated", 4: "base 2, repeated"},
        "llama-pro": {2: "new, between base 1 and base 2, made from 1", 5: "new, beside base 3, made from 3"},
        "avg-deus": {
            2: "new, between base 1 and base 2, made from 1 and 2",
            4: "new, between base 2 and base 3, made from 2 and 3",
        },
        "slices": {index: f"new, between base 2 and base 3, made from {index - 2}" for index in (3, 4, 5)},
    }


def test_solar_repeats_memory_blocks_like_any_layer(family, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "once")
    upscaled(tmp_path / "once", tmp_path / "twice", "solar", verify=True)
    assert config_of(tmp_path / "twice")["memory"] == [
        {"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "layers": [1, 4, 5, 8]}
    ]
    old, new = read_tensors(tmp_path / "once"), read_tensors(tmp_path / "twice")
    for index, source in enumerate([0, 1, 2, 3, 4, 1, 2, 3, 4, 5]):
        assert same_layers(layer(new, index), layer(old, source))
    strip(tmp_path / "twice", tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(tmp_path / "once", without=DERIVED)


def test_memories_go_only_into_families_with_classes_that_host_them(shared_base, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "olmo2", replace(FAMILIES["olmo2"], class_name=None))
    message = (
        "model_type is 'olmo2', which cannot host memory; expected one of: llama, qwen2, qwen3, gemma2, gemma3_text, mistral. "
        "Dense methods take it."
    )
    with pytest.raises(RequestError, match=message):
        with_memory(shared_base("olmo2"), tmp_path / "out")
