"""Memories on memories: what was trained keeps acting, and `strip` takes away what came last, down to the base."""

import dataclasses
import json

import pytest
import torch
from sites.cases import CASES, FEW, each, give_values
from sites.reference import add_reference
from tiny import prompt

from midus_hf.training.optim.freezing import set_trainable
from tests.upscalers.checkpoints import SMALL_MEMORY, load, logits, same_tensors
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SECOND = {"midus-hml": {"options": SMALL_MEMORY}, "llama-pro": {}}
ATTACHED = [(name, family) for name, family in FEW if CASES[name].is_attached]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def trained(folder, output):
    """The model of a folder with acting memories, saved as training saves it."""
    give_values(load(folder)).save_pretrained(output)
    return output


def same_files(left, right) -> bool:
    return all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in ("config.json", "model.safetensors")
    )


def check_stack(base, once, tmp_path, **second):
    """Upscale a trained model `once`: nothing that it computes changes, and `strip` gives it back, and then its base."""
    report = upscale(base=once, output=tmp_path / "twice", **second)
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(once))
    assert not torch.equal(logits(once), logits(base))
    result = strip(tmp_path / "twice", tmp_path / "stripped")
    assert result["base_confirmed"] is True
    assert same_files(tmp_path / "stripped", once)
    result = strip(tmp_path / "stripped", tmp_path / "stripped-twice")
    assert result["base_confirmed"] is True
    # Without the record, which strip does not bring back, only how tensors are laid out in files may differ.
    assert same_tensors(tmp_path / "stripped-twice", base)
    assert (tmp_path / "stripped-twice" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    return config_of(tmp_path / "twice")


@each(FEW, second=SECOND)
def test_layers_are_inserted_among_those_that_have_a_trained_memory(
    case, family, second, upscaled, shared_base, tmp_path
):
    once = trained(upscaled(case, family), tmp_path / "once")
    placement = "1,4" if case.is_attached else "3,7"
    words = {"method": second, "placement": placement, **SECOND[second]}
    config = check_stack(shared_base(family), once, tmp_path, **words)
    moved = dict(enumerate([0, 2, 3, 5] if case.is_attached else [0, 1, 2, 4, 5, 6]))
    entry = config["memory"][0]
    assert entry["layers"] == [moved[layer] for layer in case.layers]
    assert entry.get("into", []) == [moved[layer] for layer in case.into]
    model = load(tmp_path / "twice")
    set_trainable(model)
    trains = {name.split(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == set(placement.split(","))


@each(ATTACHED)
def test_the_same_memory_twice_has_two_names_and_the_second_alone_trains(
    case, family, upscaled, shared_base, tmp_path
):
    once = trained(upscaled(case, family), tmp_path / "once")
    config = check_stack(shared_base(family), once, tmp_path, method=case.method, options=case.options)
    second = dataclasses.replace(case, method=f"{case.method}-2")
    assert [entry["name"] for entry in config["memory"]] == [case.method, second.method]
    model = load(tmp_path / "twice", torch.float64)
    set_trainable(model)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if second.is_new(name)} != set()

    give_values(model)
    reference = load(shared_base(family), torch.float64)
    add_reference(reference, case, dict(model.state_dict()), (case.method, second.method))
    with torch.no_grad():
        expected, output = reference(prompt()).logits, model(prompt()).logits
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


SOLAR_ORDER = [0, 1, 2, 1, 2, 3]


@each([(name, "llama") for name in CASES if CASES[name].is_attached])
def test_solar_repeats_a_memory_or_is_refused_where_it_ties_layers_together(case, family, upscaled, tmp_path):
    once = trained(upscaled(case, family), tmp_path / "once")
    if case.shares_tables or case.into:
        message = (
            rf"memory 'toy' ties layers {', '.join(map(str, case.layers))} together, and the plan repeats some of them"
        )
        with pytest.raises(RequestError, match=message):
            upscale(base=once, method="solar", output=tmp_path / "solar")
        assert not (tmp_path / "solar").exists()
        return
    upscale(base=once, method="solar", output=tmp_path / "solar")
    layers = [index for index, source in enumerate(SOLAR_ORDER) if source in case.layers]
    assert config_of(tmp_path / "solar")["memory"] == [{**config_of(once)["memory"][0], "layers": layers}]
    before, after = load(once).model.layers, load(tmp_path / "solar").model.layers
    for index, source in enumerate(SOLAR_ORDER):
        state, expected = after[index].state_dict(), before[source].state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    strip(tmp_path / "solar", tmp_path / "stripped")
    assert same_files(tmp_path / "stripped", once)
