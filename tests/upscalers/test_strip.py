"""`strip` gives the base back, byte for byte."""

import itertools
import json
import math
import random

import pytest
import torch
from pairs import by_default

from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    config_of,
    edit_config,
    file_digests,
    logits,
    read_tensors,
    record_of,
    same_tensors,
    save_base,
    tensor_files,
    unverified,
    write_tensors,
)
from tests.upscalers.mutations import VALUES
from upscalers.request.errors import RequestError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip


def parents(value, path=()):
    """Every place inside nested lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from parents(inner, (*path, key))


def test_a_base_of_one_shard_with_an_index_comes_back_as_one(tmp_path):
    base = save_base(tmp_path / "base")
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(read_tensors(base), "model-00001-of-00001.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    strip(unverified(base, tmp_path / "out"), tmp_path / "stripped")
    assert [path.name for path in tensor_files(tmp_path / "stripped")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(logits(base), logits(tmp_path / "stripped"))


def test_names_without_prefix_stored_heads_and_mixed_dtypes_come_back(tmp_path):
    base = save_base(tmp_path / "base", "gemma2", prefix="")
    tensors = read_tensors(base)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    mixed = {n: t.bfloat16() if "mlp" in n else t for n, t in tensors.items()}
    write_tensors(base, {**mixed, "layers.2.self_attn.rotary_emb.inv_freq": torch.arange(4.0)})
    strip(unverified(base, tmp_path / "out"), tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)


def test_what_was_cast_stays_cast_and_this_is_said(base, tmp_path):
    said = []

    class Progress:
        start = advance = stage = finish = lambda self, *_: None

        def warn(self, message):
            said.append(message)

    strip(unverified(base, tmp_path / "out", dtype="bfloat16"), tmp_path / "stripped", progress=Progress())
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "stripped").values()} == {torch.bfloat16}
    assert said == [
        "the base was float32, and its tensors are bfloat16 since it was upscaled; they stay so.",
        "39 of 39 tensors are not the base's, byte for byte: trained since it was upscaled, or cast. Where the base itself is "
        "needed, take the base's own checkpoint.",
    ]
    assert config_of(tmp_path / "stripped")["dtype"] == "bfloat16"


def test_the_model_itself_is_only_read_and_overwrite_is_asked_for(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    before = file_digests(model)
    strip(model, tmp_path / "stripped")
    with pytest.raises(RequestError, match="stripped exists; pass --overwrite to replace it"):
        strip(model, tmp_path / "stripped")
    strip(model, tmp_path / "stripped", overwrite=True)
    with pytest.raises(RequestError, match="lies inside the base"):
        strip(model, model / "stripped")
    assert file_digests(model) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stripped"]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"../evil.safetensors": ...}, "a path"),
        ({"/tmp/evil.safetensors": ...}, "an absolute path"),
        ({"config.json": ...}, "another file"),
        ({"sub/model.safetensors": ...}, "a folder"),
        ({"model.safetensors": 5}, "no list"),
        ({"model.safetensors": [["x"]]}, "no names"),
        ([], "no mapping"),
        ("x", "text"),
        (None, "nothing"),
    ],
)
def test_a_record_that_was_tampered_with_decides_nothing(base, tmp_path, files, name):
    model = unverified(base, tmp_path / "in" / "out")
    record = record_of(model)
    names = record["base"]["files"]["model.safetensors"]
    record["base"]["files"] = (
        {f: names if v is ... else v for f, v in files.items()} if isinstance(files, dict) else files
    )
    (model / "upscale.json").write_text(json.dumps(record))
    strip(model, tmp_path / "in" / "stripped")
    assert [path.name for path in tensor_files(tmp_path / "in" / "stripped")] == ["model.safetensors"], name
    assert same_tensors(tmp_path / "in" / "stripped", base)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("record", ["5", "{}", '{"base": 5}', '{"base": {}}', "[]"])
def test_a_record_without_a_base_is_as_good_as_none(base, tmp_path, record):
    model = unverified(base, tmp_path / "out")
    (model / "upscale.json").write_text(record)
    assert "gone" in str(inspect_checkpoint(model)["base"]) or inspect_checkpoint(model)["base"] is None
    strip(model, tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)


def test_a_record_that_is_not_json_is_refused(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    (model / "upscale.json").write_text("{")
    with pytest.raises(RequestError, match=r"upscale.json is not JSON .* Delete it to go by config.json alone"):
        strip(model, tmp_path / "stripped")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"plan": None}, "config.json has a malformed plan"),
        ({"plan": [{"bas": 0}]}, "config.json has a malformed plan"),
        ({"base_config": []}, "config.json has a malformed plan"),
        ({"new_memories": [["x"]]}, r"config.json has a malformed plan \(.*new_memories is \[\['x'\]\], no list of names"),
        ({"plan": [{"base": 0}, {"base": 1}]}, "the plan in config.json has 2 layers from 2 of 4 base layers, the model 6"),
        ({"base_config": {"num_hidden_layers": 2**40}}, "has 6 layers from 4 of 1099511627776 base layers"),
    ],
)  # fmt: skip
def test_an_entry_that_was_tampered_with_is_refused(base, tmp_path, entry, message):
    model = unverified(base, tmp_path / "out")
    config = config_of(model)
    edit_config(model, upscale={**config["upscale"], **entry})
    with pytest.raises(RequestError, match=message):
        strip(model, tmp_path / "stripped")
    assert not (tmp_path / "stripped").exists()


def test_a_plan_that_takes_a_block_for_a_base_layer_is_refused(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    entry = config_of(model)["upscale"]
    entry["plan"][0], entry["plan"][1] = {"previous": None, "next": 0, "sources": [0]}, {"base": 0}
    edit_config(model, upscale=entry)
    with pytest.raises(RequestError, match=r"the base lacks \d+ tensors that its config asks for"):
        strip(model, tmp_path / "stripped")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("cases", by_default([60], [60, 200]))
def test_any_damage_to_the_entry_ends_in_a_result_or_a_clear_refusal(tmp_path, cases):
    base = save_base(tmp_path / "base", num_hidden_layers=2)
    model = unverified(base, tmp_path / "out")
    config = config_of(model)
    entry = config["upscale"]
    damaged = [path for path in parents(entry) if path[0] != "base_config" or path[-1] == "num_hidden_layers"]
    for path, value in random.Random(0).sample(list(itertools.product(damaged, VALUES)), cases):
        changed = inner = json.loads(json.dumps(entry))
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (model / "config.json").write_text(json.dumps({**config, "upscale": changed}))
        try:
            strip(model, tmp_path / "stripped", overwrite=True)
        except RequestError:
            continue
        assert same_tensors(tmp_path / "stripped", base), (path, value)


def test_inspect_tells_what_was_done(family, shared_base, tmp_path):
    base = shared_base(family)
    model = unverified(base, tmp_path / "out", placement="0,2,6", seed=7)
    told = inspect_checkpoint(model)
    tensors = read_tensors(model)
    assert (told["method"], told["seed"], told["trainable"]) == ("midus-hml", 7, "new")
    assert (told["model"], told["base"]) == (str(model), base.name)
    assert told["options"] == MEMORY_OPTIONS
    assert told["memory"] == [{"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "layers": [0, 2, 6]}]
    assert [row["index"] for row in told["layers"]] == list(range(7))
    assert [row["index"] for row in told["layers"] if row["new"]] == [0, 2, 6]
    assert [row["from"] for row in told["layers"]] == [
        "new, beside base 0, made from 0", "base 0", "new, between base 0 and base 1, made from 1", "base 1", "base 2", "base 3",
        "new, beside base 3, made from 3",
    ]  # fmt: skip
    for row in told["layers"]:
        names = [name for name in tensors if name.startswith(f"model.layers.{row['index']}.")]
        assert row["parameters"] == sum(math.prod(tensors[name].shape) for name in names)
    assert told["parameters"]["total"] == sum(tensor.numel() for tensor in tensors.values())
    assert told["parameters"]["new"] == sum(row["parameters"] for row in told["layers"] if row["new"])


def test_inspect_needs_config_json_alone(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    whole = inspect_checkpoint(model)
    for path in model.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert inspect_checkpoint(model) == {**whole, "base": "unknown: upscale.json is gone", "code": None}
