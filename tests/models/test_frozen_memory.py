"""A memory that does not train computes what it did, whatever trains around it."""

import pytest
import torch
from models.optimizer_steps import train_steps
from models.upscaled import upscaled_model
from torch import nn

BATCH_NORMED = pytest.mark.parametrize("memory_type", ["product-key", "linear"])


def memories(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".memory")]


@BATCH_NORMED
def test_training_other_layers_moves_nothing_of_a_frozen_memory(family, memory_type):
    model = upscaled_model(family, memory_type=memory_type)
    for memory in memories(model):
        memory.requires_grad_(False)
    before = [{name: tensor.clone() for name, tensor in memory.state_dict().items()} for memory in memories(model)]
    train_steps(model, 2)
    for memory, state in zip(memories(model), before, strict=True):
        assert "query_mean" in state
        assert all(torch.equal(tensor, state[name]) for name, tensor in memory.state_dict().items())
