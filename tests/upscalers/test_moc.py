"""The method moc: the names of its tensors, its layers, and what is said of it; `test_every_method` has what all methods share."""

import json
import warnings

import pytest

from tests.upscalers.checkpoints import read_tensors
from tests.upscalers.dense.requests import tiny_config, upscaled_config
from tests.upscalers.methods import SMALL_CHAPTERS as SMALL
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.upscale import upscale


def test_strip_and_inspect_say_that_a_memory_was_taken_out(command, base, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "out", options=SMALL)
    stripped = command("strip", tmp_path / "out", "--output", tmp_path / "stripped")
    assert stripped.status == 0 and "took out memory chapters. Its weights are the base's" in " ".join(
        stripped.out.split()
    )
    assert "took out memory chapters" in " ".join(command("inspect", tmp_path / "stripped").out.split())


@pytest.mark.parametrize(
    ("options", "of_layer", "of_model"),
    [
        ({}, {}, {"0.bank": [24, 32]}),
        ({"share": "none"}, {"bank": [24, 32]}, {}),
        ({"bank_rank": 5}, {}, {"0.bank": [24, 5], "0.bank_transform": [32, 5]}),
        ({"kv_heads": 2}, {"key_projection.weight": [16, 32], "value_projection.weight": [16, 32]}, {"0.bank": [24, 32]}),
        ({"share": "every:1"}, {}, {"0.bank": [24, 32], "1.bank": [24, 32]}),
        ({"bank_width": 16}, {"query_projection.weight": [16, 32], "output_projection.weight": [32, 16]}, {"0.bank": [24, 16]}),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_have_their_names(options, of_layer, of_model, base, tmp_path):
    upscale(
        base=base, method="moc", output=tmp_path / "out", options={**SMALL, "layers": [0, 3], **options}, verify=False
    )
    found = {name: list(tensor.shape) for name, tensor in read_tensors(tmp_path / "out").items() if ".memor" in name}
    expected = {
        "norm_weight": [32],
        "router_weight": [12, 32],
        "router_bias": [12],
        "query_projection.weight": [32, 32],
        "key_projection.weight": [32, 32],
        "value_projection.weight": [32, 32],
        "output_projection.weight": [32, 32],
        **of_layer,
    }
    if "bank_width" in options:
        expected |= {"key_projection.weight": [16, 16], "value_projection.weight": [16, 16]}
    names = {
        f"model.layers.{layer}.memories.chapters.{name}": shape for layer in (0, 3) for name, shape in expected.items()
    }
    names |= {f"model.memory_tables.chapters.{name}": shape for name, shape in of_model.items()}
    assert found == names


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [2, 6, 10, 14]),
        (0.25, [2, 6, 10, 14]),
        (4, [2, 6, 10, 14]),
        (0.01, [8]),
        (1, [8]),
        (2, [4, 12]),
        ([0, 5, 15], [0, 5, 15]),
        ("all", list(range(16))),
        ("early:3", [0, 1, 2]),
        ("middle:4", [6, 7, 8, 9]),
        ("middle:3", [6, 7, 8]),
        ("late:3", [13, 14, 15]),
    ],
)
def test_a_quarter_of_the_layers_has_it_unless_others_are_named(layers, expected):
    options = {**SMALL, **({} if layers is None else {"layers": layers})}
    config = upscaled_config(tiny_config("llama", num_hidden_layers=16), "moc", options=options)
    (entry,) = config["memory"]
    assert entry["layers"] == expected and entry["type"] == entry["name"] == "chapters"
    assert {key: entry[key] for key in SMALL} == SMALL


@pytest.mark.parametrize("verify", [True, False])
def test_verification_tells_memories_that_choose_by_the_prompt_what_that_is(verify, base, tmp_path):
    options = {**SMALL, "routing": "prompt"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upscale(base=base, method="moc", output=tmp_path / "once", options=options, verify=verify)
        report = upscale(base=tmp_path / "once", method="moc", output=tmp_path / "out", options=options, verify=verify)
    assert report.identity.max_abs_diff == 0.0


def test_inspect_and_methods_tell_of_it(base, command, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "out", options={**SMALL, "layers": [1, 3]}, verify=False)
    described = json.dumps(inspect_checkpoint(tmp_path / "out"), default=str)
    assert "chapters" in described and "memory_tokens" in described
    (method,) = command("methods", "moc", "--json").json()
    options = {option["name"]: option["default"] for option in method["options"]}
    assert options["layers"] == 0.25 and options["site"] == "behind-attention" and options["routing"] == "chunk"
    assert method["identity"] is True and "Mixture of Chapters" in json.dumps(method["paper"])
