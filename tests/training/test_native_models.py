"""A model of a family's own class trains like a memory model: by what its config records, or by a list of layers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_model
from training.tiny_run import NEW_LAYERS, letter_tokenizer, save_native, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from midus_hf.training.run.train import prepare, train


class SeenGradients(TrainerCallback):
    """Names of the parameters that had a gradient other than zero at any step."""

    def __init__(self):
        self.names: set[str] = set()

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.any():
                self.names.add(name)


def of_layers(names, layers) -> set[str]:
    return {name for name in names if name.startswith(tuple(f"model.layers.{layer}." for layer in layers))}


def train_watched(config) -> tuple[set[str], set[str], set[str]]:
    """Train; returns the names of all tensors, of those that moved, and of those that had a gradient."""
    run, seen = prepare(config), SeenGradients()
    run.trainer.add_callback(seen)
    run.execute()
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (config.model, config.output))
    assert before.keys() == after.keys() and all(after[name].dtype == before[name].dtype for name in before)
    return set(before), {name for name in before if not torch.equal(after[name], before[name])}, seen.names


def test_the_layers_that_the_config_records_as_new_train_and_all_else_keeps_its_bytes(
    family, native, corpus, tmp_path
):
    names, moved, with_gradient = train_watched(tiny_config(native(family), corpus, tmp_path / "out", max_steps=6))
    assert moved == with_gradient == of_layers(names, NEW_LAYERS)


def test_in_bf16_too(family, corpus, tmp_path):
    model = save_native(family, tmp_path / "model", dtype=torch.bfloat16)
    names, moved, with_gradient = train_watched(
        tiny_config(model, corpus, tmp_path / "out", precision="bf16", max_steps=6)
    )
    assert moved == with_gradient == of_layers(names, NEW_LAYERS)


def test_listed_layers_train_in_a_plain_base_and_all_else_keeps_its_bytes(family, corpus, tmp_path):
    base = save_tiny_model(family, tmp_path / "base")
    letter_tokenizer().save_pretrained(base)
    names, moved, with_gradient = train_watched(
        tiny_config(base, corpus, tmp_path / "out", trainable=[0, 3], max_steps=6)
    )
    assert moved == with_gradient == of_layers(names, [0, 3])


def test_everything_trains_if_the_config_records_that(family, corpus, tmp_path):
    model = save_native(family, tmp_path / "model", method="solar", trainable="all")
    names, moved, _ = train_watched(tiny_config(model, corpus, tmp_path / "out", max_steps=6))
    assert moved == names


def test_the_record_survives_training_and_checkpoints_and_a_second_training(family, native, corpus, tmp_path):
    config = tiny_config(native(family), corpus, tmp_path / "first", max_steps=2, save_every=1)
    train(config)
    train(tiny_config(tmp_path / "first", corpus, tmp_path / "second", max_steps=1))
    before = json.loads((native(family) / "config.json").read_text())
    for folder in ("first", "first/checkpoint-1", "second"):
        after = json.loads((tmp_path / folder / "config.json").read_text())
        assert after["upscale"] == before["upscale"]
        assert AutoConfig.from_pretrained(tmp_path / folder).upscale == before["upscale"]
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == before


@pytest.mark.parametrize("trainable", ["new", "all"])
def test_norms_and_biases_do_not_decay_and_matrices_do(family, corpus, tmp_path, trainable):
    model = AutoModelForCausalLM.from_pretrained(save_native(family, tmp_path / "model"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(-1)
    model.save_pretrained(tmp_path / "model")
    run = prepare(tiny_config(tmp_path / "model", corpus, tmp_path / "out", trainable=trainable, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    run.trainer.create_optimizer().step()
    for name, parameter in run.model.named_parameters():
        decays = parameter.requires_grad and "norm" not in name and not name.endswith("bias")
        expected = before[name] * (1 - 1e-2 * 0.5) if decays else before[name]
        assert torch.equal(parameter, expected), name
