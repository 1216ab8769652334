"""A model that is about to train says which of its memories cannot learn, once, and is silent otherwise."""

import warnings

import pytest
import torch
from models.chapter_models import LAYERS as CHAPTER_LAYERS
from models.chapter_models import chapter_model
from models.depth_models import depth_model
from models.upscaled import SIZES, upscaled_model

from midus_hf.memory.registry import MemoryModule

LAYERS = (1, 4)


def fresh(family: str = "llama", memory_type: str = "headwise"):
    """A model whose memories hold zeros, as `upscale` makes them."""
    return upscaled_model(family, acting=False, memory_type=memory_type)


def freeze_values(model, layers=LAYERS) -> None:
    for layer in layers:
        model.model.layers[layer].memory.value_bank.requires_grad_(False)


def warnings_of(model, times: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model.train()
    assert model.training and all(module.training for module in model.modules())
    return [str(warning.message) for warning in caught]


def test_frozen_values_of_zero_are_named_with_the_remedy(family):
    model = fresh(family)
    freeze_values(model)
    (message,) = warnings_of(model)
    assert message == (
        "the memory values of layers 1, 4 are zero and frozen, so the memories there have no effect and no gradient, adapters "
        "included. Let them train: with midus_hf.training.set_trainable(model), or, with PEFT, "
        "get_peft_model(model, midus_hf.training.lora_config(model))."
    )


@pytest.mark.parametrize("memory_type", SIZES)
def test_it_is_said_once_of_every_type_of_memory_and_of_the_layers_concerned(memory_type):
    model = fresh(memory_type=memory_type)
    freeze_values(model, [4])
    (message,) = warnings_of(model, times=3)
    assert message.startswith("the memory values of layer 4 are zero and frozen")


def unchanged(model) -> None:
    """Everything trains, as a plain Trainer has it."""


def only_new_layers(model) -> None:
    model.requires_grad_(False)
    for layer in LAYERS:
        model.model.layers[layer].requires_grad_(True)


def memories_hold_values(model) -> None:
    freeze_values(model)
    for module in model.modules():
        if isinstance(module, MemoryModule):
            module.value_bank.data[-1, -1] = 1e-6


def nothing_trains(model) -> None:
    model.requires_grad_(False)


def on_no_device(model) -> None:
    freeze_values(model)
    model.to("meta")


def sharded_elsewhere(model) -> None:
    freeze_values(model)
    for module in model.modules():
        if isinstance(module, MemoryModule):
            module.value_bank.data = torch.empty(0)


@pytest.mark.parametrize(
    "change",
    [unchanged, only_new_layers, memories_hold_values, nothing_trains, on_no_device, sharded_elsewhere],
    ids=lambda change: change.__name__,
)
def test_nothing_is_said_where_nothing_is_wrong_or_nothing_can_be_seen(change):
    model = fresh()
    change(model)
    assert warnings_of(model, times=2) == []


def test_nothing_is_said_of_inference():
    model = fresh()
    freeze_values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()


def test_values_that_hold_something_are_looked_at_once(monkeypatch):
    model = fresh()
    memories_hold_values(model)
    warnings_of(model)
    monkeypatch.setattr(torch.Tensor, "any", lambda *_: pytest.fail("looked at again"))
    warnings_of(model)


def test_chapters_whose_output_projection_is_zero_and_frozen_are_named():
    model = chapter_model(acting=False)
    for layer in CHAPTER_LAYERS:
        model.model.layers[layer].memories["chapters"].output_projection.requires_grad_(False)
    (message,) = warnings_of(model)
    assert message.startswith(
        f"the memory projections of layers {', '.join(map(str, CHAPTER_LAYERS))} are zero and frozen, so the memories"
    )
    with torch.no_grad():
        model.model.layers[CHAPTER_LAYERS[0]].memories["chapters"].output_projection.weight[0, 0] = 1.0
    model.model.warned_of_dead_memories = False
    (message,) = warnings_of(model)
    assert f"of layer {CHAPTER_LAYERS[1]} are zero" in message


def freeze_memories(model, *leaves):
    for name, parameter in model.named_parameters():
        if ".memories." in name and name.rpartition(".memories.")[2].partition(".")[2].startswith(leaves):
            parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "frozen", "message"),
    [
        ("default", ("ffn_value", "depth_gate"), "the memory projections of layers 1, 2 are zero and frozen"),
        ("default", ("ffn_value",), None),  # a gate changes what is read of the sequence
        ("default", ("depth_gate",), None),  # values are added as they are
        ("default", ("ffn_key",), None),
        ("reused", ("depth_gate",), "the memory gates of layers 1, 2, 3 are zero and frozen"),
        ("reused", ("ffn_value",), None),
        ("joint", ("ffn_value", "ffn_key"), None),
    ],
)
def test_memories_of_the_depth_are_dead_by_how_they_are_joined(kind, frozen, message):
    model = depth_model(kind=kind, acting=False)
    freeze_memories(model, *frozen)
    told = warnings_of(model)
    assert not told if message is None else len(told) == 1 and told[0].startswith(message)
