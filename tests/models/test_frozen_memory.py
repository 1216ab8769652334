"""A memory that does not train computes what it did, whatever trains around it."""

import pytest
import torch
from models.upscaled import upscaled_model
from tiny import prompt
from torch import nn

BATCH_NORMED = pytest.mark.parametrize("memory_type", ["product-key", "linear"])


def memories(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".memory")]


def train_two_steps(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(2):
        model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@BATCH_NORMED
def test_training_other_layers_moves_nothing_of_a_frozen_memory(family, memory_type):
    model = upscaled_model(family, memory_type=memory_type)
    for memory in memories(model):
        memory.requires_grad_(False)
    before = [{name: tensor.clone() for name, tensor in memory.state_dict().items()} for memory in memories(model)]
    train_two_steps(model)
    for memory, state in zip(memories(model), before, strict=True):
        assert "query_mean" in state
        assert all(torch.equal(tensor, state[name]) for name, tensor in memory.state_dict().items())
