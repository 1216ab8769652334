"""The new layers train, whole and alone, or the layers that were listed do, or everything does."""

import re

import pytest
from rich.console import Console
from training.tiny_run import NEW_LAYERS
from transformers import AutoModelForCausalLM

from midus_hf.training.optim.freezing import set_trainable


@pytest.fixture
def model(family, upscaled):
    return AutoModelForCausalLM.from_pretrained(upscaled(family))


def test_the_new_layers_train_whole_and_nothing_else_does(model):
    report = set_trainable(model, "new")
    inside = [f"model.layers.{layer}." for layer in NEW_LAYERS]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == any(name.startswith(prefix) for prefix in inside), name
    assert report.layers == NEW_LAYERS
    assert report.num_layers == 6
    assert report.parameters == sum(p.numel() for layer in NEW_LAYERS for p in model.model.layers[layer].parameters())
    assert report.total_parameters == model.num_parameters()
    assert set(report.parameters_of_part) == {"layers.self_attn", "layers.input_layernorm", "layers.memory"}
    assert sum(report.parameters_of_part.values()) == report.parameters


def test_all_trains_everything_and_counts_it_once(model):
    set_trainable(model, "new")
    report = set_trainable(model, "all")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert report.layers == [0, 1, 2, 3, 4, 5]
    assert report.parameters == report.total_parameters == sum(report.parameters_of_part.values())


def test_the_report_names_the_layers_and_counts_parameters(upscaled):
    report = set_trainable(AutoModelForCausalLM.from_pretrained(upscaled("llama")), "new")
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report)
    text = captured.get()
    assert f"Training the new layers alone: {report.parameters:,} of {report.total_parameters:,} parameters" in text
    assert "2 of 6 layers" in text and "layers 1, 4" in text


def test_the_report_of_listed_layers_names_them_once(native):
    report = set_trainable(AutoModelForCausalLM.from_pretrained(native("llama")), [5, 0, 2])
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report)
    text = captured.get()
    assert f"Training layers 0, 2, 5 alone: {report.parameters:,} of {report.total_parameters:,} parameters" in text
    assert "3 of 6 layers" in text and text.count("0, 2, 5") == 1


def test_listed_layers_train_whole_and_nothing_else_does(family, native):
    model = AutoModelForCausalLM.from_pretrained(native(family))
    set_trainable(model, "all")
    report = set_trainable(model, [5, 2])
    inside = [f"model.layers.{layer}." for layer in (2, 5)]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == any(name.startswith(prefix) for prefix in inside), name
    assert (report.trainable, report.layers, report.num_layers) == ([5, 2], [2, 5], 6)
    assert report.parameters == sum(p.numel() for layer in (2, 5) for p in model.model.layers[layer].parameters())
    assert sum(report.parameters_of_part.values()) == report.parameters
    assert all(part.startswith("layers.") for part in report.parameters_of_part)


def test_auto_is_what_the_config_records(family, native, upscaled):
    for checkpoint in (native(family), upscaled(family)):
        report = set_trainable(AutoModelForCausalLM.from_pretrained(checkpoint), "auto")
        assert (report.trainable, report.layers) == ("new", NEW_LAYERS)
    model = AutoModelForCausalLM.from_pretrained(native(family))
    model.config.upscale["trainable"] = "all"
    report = set_trainable(model, "auto")
    assert (report.trainable, report.layers) == ("all", [0, 1, 2, 3, 4, 5])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("upscale", "value"), [(None, "None"), ({}, "None"), ({"trainable": ["new"]}, r"\['new'\]")], ids=str
)
def test_auto_needs_a_config_that_records_what_trains(native, upscale, value):
    model = AutoModelForCausalLM.from_pretrained(native("llama"))
    model.config.upscale = upscale
    with pytest.raises(
        ValueError,
        match=f"trainable is 'auto', but upscale.trainable in the config of this llama model is {value}; expected 'new' "
        r"or 'all' there. Upscale the model first, or set trainable: all, or list layers, as in trainable: \[3, 7\].",
    ):
        set_trainable(model, "auto")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"trainable is \[\], no layer; list at least one, or set trainable: all."),
        ([3, 1, 3, 1], r"trainable is \[3, 1, 3, 1\], which repeats \[1, 3\]; name each layer once."),
        ([1, 6], r"trainable is \[1, 6\], but this llama model has no layers \[6\]; expected 0 <= layer < 6."),
        ([-1, 2], r"trainable is \[-1, 2\], but this llama model has no layers \[-1\]; expected 0 <= layer < 6."),
    ],
)
def test_a_list_that_is_none_of_layers_of_the_model_is_refused(native, layers, message):
    model = AutoModelForCausalLM.from_pretrained(native("llama"))
    with pytest.raises(ValueError, match=message):
        set_trainable(model, layers)
    assert all(parameter.requires_grad for parameter in model.parameters()), "nothing was frozen"


@pytest.mark.parametrize("upscale", [None, {}, {"new_layers": []}, {"new_layers": [1, 6]}])
def test_a_config_that_names_no_layers_of_the_model_is_refused(upscaled, upscale):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    model.config.upscale = upscale
    message = (
        "names \\[6\\]; expected 0 <= layer < 6" if upscale and upscale["new_layers"] else "or set trainable: all"
    )
    with pytest.raises(ValueError, match=message):
        set_trainable(model, "new")


@pytest.mark.parametrize("trainable", ["none", None, 3, [True], ["3"]], ids=str)
def test_another_word_for_what_trains_is_refused(upscaled, trainable):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    message = f"trainable is {trainable!r}; expected 'auto', 'new', 'all', a list of layer indices, or one of roles"
    with pytest.raises(ValueError, match=re.escape(message)):
        set_trainable(model, trainable)


@pytest.mark.parametrize("roles", [["value"], ["key", "value"], ["transform"]], ids=str)
def test_roles_name_tensors_of_the_new_memories(upscaled, roles):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    names = {"key": {"row_keys", "column_keys"}, "value": {"value_bank"}, "transform": {"value_transform"}}
    report = set_trainable(model, roles)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == set().union(*(names[role] for role in roles))
    assert all(".memory." in name for name in trained)
    assert report.layers == model.config.upscale["new_layers"] and report.parameters_of_part.keys() == {
        "layers.memory"
    }


def test_roles_that_the_new_memories_do_not_have_are_refused(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with pytest.raises(
        ValueError, match=r"trainable is \['router'\], but the new memories of this midus_llama model have no"
    ):
        set_trainable(model, ["router"])


def test_roles_can_be_kept_from_training(model):
    set_trainable(model, "all")
    values = {name for name, _ in model.named_parameters() if name.endswith("value_bank")}
    report = set_trainable(model, "all", frozen=["value"])
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == values != set()
    assert report.parameters == report.total_parameters - sum(model.get_parameter(name).numel() for name in values)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(report)
    assert "Training everything, without the value tensors of memories: " in captured.get()


@pytest.mark.parametrize(
    ("trainable", "frozen", "message"),
    [
        (
            "new",
            ["router"],
            "frozen is ['router'], but of this midus_llama model no memory tensors of the role 'router' would",
        ),
        ([0], ["value"], "no memory tensors of the role 'value' would train; leave it out."),
        (
            ["value"],
            ["value"],
            "frozen is ['value'], which leaves nothing to train; freeze less, or set trainable: all.",
        ),
    ],
)
def test_what_cannot_be_kept_from_training_is_refused(upscaled, trainable, frozen, message):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with pytest.raises(ValueError, match=re.escape(message)):
        set_trainable(model, trainable, frozen)
