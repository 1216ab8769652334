"""Either the new layers train, whole and alone, or everything does."""

import pytest
from rich.console import Console
from training.tiny_run import NEW_LAYERS
from transformers import AutoModelForCausalLM

from midus_hf.training import set_trainable


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


@pytest.mark.parametrize("upscale", [None, {}, {"new_layers": []}, {"new_layers": [1, 6]}])
def test_a_config_that_names_no_layers_of_the_model_is_refused(upscaled, upscale):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    model.config.upscale = upscale
    message = (
        "names \\[6\\]; expected 0 <= layer < 6" if upscale and upscale["new_layers"] else "or set trainable: all"
    )
    with pytest.raises(ValueError, match=message):
        set_trainable(model, "new")


def test_another_word_for_what_trains_is_refused(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with pytest.raises(ValueError, match=r"trainable is 'none'; expected 'new' or 'all'."):
        set_trainable(model, "none")
