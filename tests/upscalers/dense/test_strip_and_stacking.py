"""Dense layers come out again byte for byte, and models that were upscaled are upscaled again."""

import json
from dataclasses import replace

import pytest
import torch

from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    RECORD,
    SMALL_MEMORY,
    file_digests,
    load,
    logits,
    read_tensors,
    same_tensors,
    save_base,
    tensor_files,
)
from tests.upscalers.chosen_families import families
from tests.upscalers.dense.layers import layer, same_layers
from tests.upscalers.dense.requests import REQUESTS, upscaled
from upscalers.architecture.families import FAMILIES
from upscalers.request.errors import RequestError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

family = families("qwen3", "gemma3")

DERIVED = ("README.md", "upscale.json")
"""Files of an upscaled model that stripping a stacked one does not bring back."""


def with_memory(base, output, **request):
    return upscale(base=base, method="midus-hml", output=output, **{"options": SMALL_MEMORY, **request})


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def same_checkpoint(left, right) -> bool:
    """Whether tensors and config are the same byte for byte; how tensors are laid out in files is not kept twice."""
    return same_tensors(left, right) and (left / "config.json").read_bytes() == (right / "config.json").read_bytes()


def without_seconds(path):
    """The record of a run, without how long its solvers took."""
    record = json.loads(path.read_text())
    for row in record["measurements"]:
        row.pop("seconds")
    return record


@pytest.mark.parametrize("size", [None, "30KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("method", REQUESTS)
def test_every_file_of_the_base_comes_back_byte_for_byte(native_family, method, size, tmp_path):
    base = save_base(tmp_path / "base", native_family, torch.bfloat16 if size else torch.float32, max_shard_size=size)
    report = upscaled(base, tmp_path / "out", method, max_shard_size="40KB")
    result = strip(tmp_path / "out", tmp_path / "stripped")
    assert result["removed_layer_indices"] == report.new_layer_indices
    assert (result["num_layers"], result["model_type"]) == (4, report.model_type)
    index = ("model.safetensors.index.json",)
    assert file_digests(tmp_path / "stripped", without=(*RECORD, *index)) == file_digests(base, without=index)
    assert len(tensor_files(base)) == 1 or size


@pytest.mark.parametrize("method", REQUESTS)
def test_without_the_record_config_json_is_enough(method, base, tmp_path):
    upscaled(base, tmp_path / "out", method)
    load(tmp_path / "out").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "upscale.json").exists()
    strip(tmp_path / "saved", tmp_path / "stripped")
    assert same_checkpoint(tmp_path / "stripped", base)


@pytest.mark.parametrize("method", REQUESTS)
def test_the_model_card_holds_what_makes_the_same_bytes_again(method, base, tmp_path, command):
    upscaled(base, tmp_path / "out", method, seed=3)
    recipe = (tmp_path / "out" / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe.yaml").write_text(recipe)
    made = command("--config", tmp_path / "recipe.yaml", "--base", base, "--output", tmp_path / "again", "--no-verify")
    assert made.status == 0, made.err
    record = ("upscale.json",)
    assert file_digests(tmp_path / "again", without=record) == file_digests(tmp_path / "out", without=record)
    assert without_seconds(tmp_path / "again" / "upscale.json") == without_seconds(tmp_path / "out" / "upscale.json")


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


def test_after_training_solar_the_first_of_two_copies_comes_back(base, tmp_path):
    upscaled(base, tmp_path / "out", "solar")
    model = load(tmp_path / "out")
    with torch.no_grad():
        for index in (3, 4):
            for parameter in model.model.layers[index].parameters():
                parameter.add_(1)
    model.save_pretrained(tmp_path / "trained")
    strip(tmp_path / "trained", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)


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


@pytest.mark.parametrize("order", [("llama-pro", "midus-hml"), ("midus-hml", "llama-pro")], ids="-".join)
@pytest.mark.parametrize("verify", [True, False])
def test_copies_and_memories_stack_in_either_order_as_the_identity(family, order, verify, shared_base, tmp_path):
    base = shared_base(family)
    first, second = (with_memory if method == "midus-hml" else upscaled for method in order)
    dense = {"method": "llama-pro"}
    first(base, tmp_path / "once", **(dense if first is upscaled else {}), verify=verify)
    # Six layers: the copies stand at 2 and 5, or the memories at 1 and 4; neither is in the way at 3 and 7.
    report = second(
        tmp_path / "once", tmp_path / "twice", **(dense if second is upscaled else {}), placement="3,7", verify=verify
    )
    assert report.identity.max_abs_diff == 0.0 and report.model_type.startswith("midus_")
    assert torch.equal(logits(base), logits(tmp_path / "twice"))
    assert config_of(tmp_path / "twice")["upscale"]["new_layers"] == [3, 7]
    strip(tmp_path / "twice", tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(tmp_path / "once", without=DERIVED)
    strip(tmp_path / "stripped", tmp_path / "stripped-twice")
    assert same_checkpoint(tmp_path / "stripped-twice", base)


def test_trained_memories_keep_their_effect_among_new_copies(family, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "once")
    model = load(tmp_path / "once")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".memory." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "trained")
    assert not torch.allclose(logits(shared_base(family)), logits(tmp_path / "trained"))
    upscaled(tmp_path / "trained", tmp_path / "twice", "llama-pro", placement="3,7", verify=True)
    assert torch.equal(logits(tmp_path / "trained"), logits(tmp_path / "twice"))
    assert config_of(tmp_path / "twice")["memory"] == [
        {"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "layers": [1, 5]}
    ]


def test_solar_stacks_on_solar_and_each_strip_takes_one_stack_away(native_family, shared_base, tmp_path):
    base = shared_base(native_family)
    upscaled(base, tmp_path / "once", "solar")
    upscaled(tmp_path / "once", tmp_path / "twice", "solar", verify=True)
    old, new = read_tensors(base), read_tensors(tmp_path / "twice")
    for index, source in enumerate([0, 1, 2, 1, 2, 1, 2, 1, 2, 3]):
        assert same_layers(layer(new, index), layer(old, source))
    strip(tmp_path / "twice", tmp_path / "stripped")
    assert file_digests(tmp_path / "stripped", without=RECORD) == file_digests(tmp_path / "once", without=DERIVED)
    strip(tmp_path / "stripped", tmp_path / "stripped-twice")
    assert same_checkpoint(tmp_path / "stripped-twice", base)


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


MEMORY_SOURCE = (
    "would be made from base layer {}, which is a memory block; expected a layer with a feed-forward network. Choose "
)


@pytest.mark.parametrize(
    ("method", "request_", "layer"),
    [
        ("llama-pro", {"placement": "2"}, 1),
        ("llama-pro", {"placement": "5"}, 4),
        ("attenuated-copy", {"placement": "2"}, 1),
        ("avg-deus", {"placement": "1"}, 1),
        ("avg-deus", {"placement": "2"}, 1),
        ("linear-combination", {"placement": "2", "options": {}}, 1),
        ("linear-combination", {"placement": "3", "options": {"coefficients": {4: 1}}}, 4),
        ("slices", {"options": {"slices": [{"layers": [0, 6]}, {"layers": [3, 5], "scale": {"up": 0.5}}]}}, 4),
    ],
    ids=str,
)
def test_a_memory_block_is_no_source_of_a_dense_layer(family, method, request_, layer, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "once")
    with pytest.raises(RequestError, match=MEMORY_SOURCE.format(layer)):
        upscaled(tmp_path / "once", tmp_path / "twice", method, **request_)
    assert not (tmp_path / "twice").exists()


def test_memories_go_only_into_families_with_classes_that_host_them(shared_base, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "olmo2", replace(FAMILIES["olmo2"], class_name=None))
    message = (
        "model_type is 'olmo2', which cannot host memory; expected one of: llama, qwen2, qwen3, gemma2, gemma3_text, mistral. "
        "Dense methods take it."
    )
    with pytest.raises(RequestError, match=message):
        with_memory(shared_base("olmo2"), tmp_path / "out")
