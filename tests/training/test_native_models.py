"""A model of a family's own class trains like a memory model: by what its config records, or by a list of layers."""

import pytest
import torch
from pairs import by_default
from tiny import FAMILIES, save_tiny_model
from training.outcomes import moved, weights
from training.tiny_run import NEW_LAYERS, letter_tokenizer, save_native
from transformers import AutoModelForCausalLM, TrainerCallback

from midus_hf.training.run import TrainingRun


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
    run, seen = TrainingRun(config), SeenGradients()
    run.trainer.add_callback(seen)
    run.execute()
    return set(weights(config.model_name_or_path)), moved(config.model_name_or_path, config.output_dir), seen.names


@pytest.mark.parametrize("family", by_default(["qwen2", "gemma2"], FAMILIES))
def test_the_layers_that_the_config_records_as_new_train_in_bf16_and_all_else_keeps_its_bytes(
    family, config_for, tmp_path
):
    model = save_native(family, tmp_path / "model", dtype=torch.bfloat16)
    names, changed, with_gradient = train_watched(config_for(model=model, bf16=True, max_steps=6))
    assert changed == with_gradient == of_layers(names, NEW_LAYERS)


@pytest.mark.parametrize("family", by_default(["gemma3"], FAMILIES))
def test_listed_layers_or_everything_trains_in_a_plain_base(family, config_for, tmp_path):
    base = save_tiny_model(family, tmp_path / "base")
    letter_tokenizer().save_pretrained(base)
    names, changed, with_gradient = train_watched(config_for("some", model=base, trainable=[0, 3], max_steps=6))
    assert changed == with_gradient == of_layers(names, [0, 3])
    names, changed, _ = train_watched(config_for("every", model=base, trainable="all", max_steps=6))
    assert changed == names


@pytest.mark.parametrize(("family", "trainable"), [("qwen2", "new"), ("gemma3", "all")])
def test_norms_and_biases_do_not_decay_and_matrices_do(family, config_for, tmp_path, trainable):
    model = AutoModelForCausalLM.from_pretrained(save_native(family, tmp_path / "model"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(-1)
    model.save_pretrained(tmp_path / "model")
    run = TrainingRun(config_for(model=tmp_path / "model", trainable=trainable, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    run.trainer.create_optimizer().step()
    for name, parameter in run.model.named_parameters():
        decays = parameter.requires_grad and "norm" not in name and not name.endswith("bias")
        expected = before[name] * (1 - 1e-2 * 0.5) if decays else before[name]
        assert torch.equal(parameter, expected), name
