"""Memories on memories: what was trained keeps acting, and `strip` takes away what came last, down to the base."""

import dataclasses
import json

import pytest
import torch
from sites.cases import CASES, each, give_values
from sites.reference import add_reference
from tiny import prompt

from midus_hf.training.optim.freezing import set_trainable
from tests.upscalers.checkpoints import SMALL_MEMORY, load, logits, same_tensors
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

ATTACHED = [name for name, case in CASES.items() if case.is_attached]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def once(case, family, upscaled, tmp_path):
    """The model of a case whose memories act, saved as training saves it."""
    give_values(load(upscaled(case, family))).save_pretrained(tmp_path / "once")
    return tmp_path / "once"


def check_stripped(folder, once, output):
    """Take away what was made of a model; that gives its files back."""
    assert strip(folder, output)["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (output / name).read_bytes() == (once / name).read_bytes()


@each()
def test_a_trained_memory_stays_with_its_layers_where_others_are_inserted(case, family, once, tmp_path):
    placement, moved = ([1, 4], [0, 2, 3, 5]) if case.is_attached else ([3, 7], [0, 1, 2, 4, 5, 6])
    words = {"placement": ",".join(map(str, placement)), "options": SMALL_MEMORY}
    upscale(base=once, method="midus-hml", output=tmp_path / "twice", verify=False, **words)
    assert torch.equal(logits(tmp_path / "twice"), logits(once))
    entry = config_of(tmp_path / "twice")["memory"][0]
    assert entry["layers"] == [moved[layer] for layer in case.layers]
    assert entry.get("into", []) == [moved[layer] for layer in case.into]
    model = load(tmp_path / "twice")
    assert set_trainable(model).layers == placement


@each(ATTACHED)
def test_the_same_memory_twice_has_two_names_and_the_second_alone_trains(case, family, once, shared_base, tmp_path):
    report = upscale(base=once, method=case.method, output=tmp_path / "twice", options=case.options)
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(once))
    second = dataclasses.replace(case, method=f"{case.method}-2")
    assert [entry["name"] for entry in config_of(tmp_path / "twice")["memory"]] == [case.method, second.method]
    check_stripped(tmp_path / "twice", once, tmp_path / "stripped")
    assert strip(tmp_path / "stripped", tmp_path / "bare")["base_confirmed"] is True
    assert same_tensors(tmp_path / "bare", shared_base(family))

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


@each(ATTACHED)
def test_solar_repeats_a_memory_or_is_refused_where_it_ties_layers_together(case, family, once, tmp_path):
    solar = tmp_path / "solar"
    if case.shares_tables or case.into:
        layers = ", ".join(map(str, case.layers))
        message = rf"memory 'toy' ties layers {layers} together, and the plan repeats some of them"
        with pytest.raises(RequestError, match=message):
            upscale(base=once, method="solar", output=solar)
        assert not solar.exists()
        return
    upscale(base=once, method="solar", output=solar)
    layers = [index for index, source in enumerate(SOLAR_ORDER) if source in case.layers]
    assert config_of(solar)["memory"] == [{**config_of(once)["memory"][0], "layers": layers}]
    before, after = load(once).model.layers, load(solar).model.layers
    for index, source in enumerate(SOLAR_ORDER):
        state, expected = after[index].state_dict(), before[source].state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    check_stripped(solar, once, tmp_path / "stripped")
