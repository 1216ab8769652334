"""The method ultramem-v2: all of it trains, its tensors have their names, and rows that nothing reads are told."""

import pytest
import torch
from tiny import prompt, save_tiny_model

from tests.upscalers.checkpoints import config_of, load, read_tensors
from tests.upscalers.methods import KINDS
from tests.upscalers.methods import SMALL_TABLES as SMALL
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("ultramem-v2")])
def test_after_three_steps_every_new_tensor_has_moved(native_family, kind, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base", torch.float32)
    upscale(base=base, output=tmp_path / "out", verify=False, **KINDS[kind])
    model, native = load(tmp_path / "out").train(), dict(load(base).named_parameters())
    before = {name: value.clone() for name, value in model.named_parameters() if name not in native}
    optimizer = torch.optim.AdamW([value for name, value in model.named_parameters() if name in before], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(prompt(), labels=prompt()).loss.backward()
        optimizer.step()
    assert before
    still = [name for name, value in model.named_parameters() if name in before and torch.equal(value, before[name])]
    assert not still


@pytest.mark.parametrize(
    ("options", "of_layer", "of_model"),
    [
        ({}, {"value_table": [64, 6], "pre_value_table": [64, 2], "row_keys": [1, 1, 8, 2, 16]}, {}),
        (
            {"share": "all"},
            {"column_keys": [1, 1, 8, 2, 16]},
            {"0.value_table": [64, 6], "0.pre_value_table": [64, 2]},
        ),
        (
            {"share": "ring:4"},
            {"row_keys": [1, 1, 16, 2, 16]},
            {"0.value_table": [256, 6], "0.pre_value_table": [256, 2]},
        ),
        (
            {"share": "ring:2", "pre_value_width": 0},
            {"row_keys": [1, 1, 11, 2, 16]},
            {"0.value_table": [256, 6]},
        ),
        (
            {"key_pairs": 2},
            {"core": [1, 2, 2, 2, 2], "value_projection.weight": [32, 6], "value_table": [64, 6]},
            {},
        ),
    ],
    ids=["own", "all", "ring", "no pre-values", "expanded"],
)
def test_tensors_have_their_names(options, of_layer, of_model, base, tmp_path):
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options={**SMALL, **options}, verify=False)
    tensors = {name: list(value.shape) for name, value in read_tensors(tmp_path / "out").items()}
    prefix = "model.layers.1.memories.ultramem."
    found = {name.removeprefix(prefix): shape for name, shape in tensors.items() if name.startswith(prefix)}
    assert {name: found[name] for name in of_layer} == of_layer
    tables = "model.memory_tables.ultramem."
    assert {name.removeprefix(tables): shape for name, shape in tensors.items() if name.startswith(tables)} == of_model
    assert ("value_table" in found) == (not of_model)


def test_tables_of_zeros_take_no_room_on_the_disk(base, tmp_path):
    """Of 6.3 MB per layer that hold values of zero, the file has holes."""
    options = {"n": 256, "k": 2, "value_width": 24, "pre_value_width": 0, "layers": 2}
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    file = (tmp_path / "out" / "model.safetensors").stat()
    assert file.st_size > 12e6 and file.st_blocks * 512 < 2e6
    assert not any(
        value.any() for name, value in read_tensors(tmp_path / "out").items() if name.endswith("value_table")
    )


def test_a_model_from_a_config_trains_from_scratch_without_zeros(base, tmp_path):
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=SMALL, verify=False)
    config = load(tmp_path / "out").config
    config.memory = [{**config.memory[0], "zero": "none"}]
    model = type(load(tmp_path / "out"))(config)
    memory = model.get_decoder().layers[0].memories["ultramem"]
    assert memory.value_table.abs().min() > 0 and memory.value_projection.weight.abs().min() > 0
    assert config_of(tmp_path / "out")["memory"][0]["zero"] == "values"
