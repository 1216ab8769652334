"""A model of a family's own class trains like a memory model: by what its config records, or by a list of layers."""

import pytest
import torch
from training.tiny_run import save_native
from transformers import AutoModelForCausalLM

from midus_hf.training.run import TrainingRun


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
