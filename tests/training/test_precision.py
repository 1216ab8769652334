"""The dtypes in which a model is held while it trains."""

import pytest
import torch
from analysis.memory_models import memory_model

from midus_hf.training.optim.precision import hold_for_training, restore_dtypes


def batch_norm_model(family: str):
    return memory_model(family, "product-key").to(torch.bfloat16)


@pytest.mark.parametrize("bf16", [True, False])
def test_what_trains_and_running_statistics_are_held_in_float32_and_given_back(family, bf16):
    model = batch_norm_model(family).requires_grad_(False)
    memory = model.model.layers[1].memory
    memory.requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtypes = hold_for_training(model, bf16)
    assert memory.query_mean.dtype == memory.query_variance.dtype == memory.value_bank.dtype == torch.float32
    frozen = model.model.layers[0].self_attn.q_proj.weight
    assert frozen.dtype == (torch.bfloat16 if bf16 else torch.float32)
    restore_dtypes(model, dtypes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for name, tensor in model.state_dict().items()} == {torch.bfloat16}


def test_running_statistics_of_a_bfloat16_model_arrive_where_those_of_float64_do():
    model = batch_norm_model("llama")
    hold_for_training(model, bf16=True)
    memory = model.model.layers[1].memory.train()
    inputs = torch.randn(4, 50, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(200):
            memory.queries(inputs.float() + 3)
        query = memory.query_projection((inputs + 3).to(memory.query_projection.weight.dtype)).double()
    exact = query.flatten(0, 1).unflatten(-1, (memory.num_heads, -1))
    torch.testing.assert_close(memory.query_mean.double(), exact.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(memory.query_variance.double(), exact.var(0), rtol=1e-3, atol=1e-4)
