"""A trained memory is saved and loaded in shards, tables that layers share once."""

import json

import pytest
import torch
from models.optimizer_steps import train_steps
from sites.cases import CASES, MOST, each
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates
from tests.upscalers.checkpoints import logits, read_tensors, tensor_files


@each(MOST)
def test_a_trained_model_is_after_saving_in_shards_what_it_was(case, family, toy_model, tmp_path):
    model = toy_model(case, family, acting=False)
    with torch.no_grad():
        untrained = model(prompt()).logits
    set_trainable(model)
    train_steps(model, 2, parameter_groups(model, Rates(learning_rate=1e-2)))
    with torch.no_grad():
        trained = model(prompt()).logits
    assert not torch.equal(trained, untrained)
    model.save_pretrained(tmp_path / "saved", max_shard_size="8KB")
    assert len(tensor_files(tmp_path / "saved")) > 2
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    assert type(again) is type(model)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(tmp_path / "saved"), trained)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["memory"] == model.config.memory and saved["upscale"] == model.config.upscale


@pytest.mark.parametrize(
    ("case", "tables"), [("shared tables", [(2, 32), (2, 32)]), ("skip within layers", [(3, 32), (3, 32)])]
)
def test_shared_tables_are_saved_once(case, tables, toy_model, tmp_path):
    model = toy_model(CASES[case], "llama")
    model.save_pretrained(tmp_path)
    tensors = read_tensors(tmp_path)
    ups = {name: tensor for name, tensor in tensors.items() if name.endswith(".up")}
    assert sorted(ups) == ["model.memory_tables.toy.0.up", "model.memory_tables.toy.1.up"]
    assert [tuple(ups[name].shape) for name in sorted(ups)] == tables
    assert sum(name.endswith("memories.toy.down") for name in tensors) == 4
