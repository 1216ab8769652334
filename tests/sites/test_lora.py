"""PEFT on a model with attached memories: adapters on what the base brought, and the memory trained whole."""

import torch
from models.optimizer_steps import train_steps
from peft import PeftModel, get_peft_model
from sites.cases import SOME, each
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.training.adapters import lora_config
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates


def logits(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompt(), use_cache=False, **inputs).logits


@each(SOME)
def test_the_memory_trains_whole_the_base_by_adapters_and_merging_keeps_what_they_compute(
    case, family, toy_model, tmp_path
):
    torch.manual_seed(0)
    start = toy_model(case, family, acting=False)
    state = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    untrained = logits(start)
    model = get_peft_model(start, lora_config(start, r=2))
    assert torch.equal(logits(model), untrained)
    parameters = dict(model.named_parameters())
    trains = {name for name, parameter in parameters.items() if parameter.requires_grad}
    whole = {name for name in trains if "lora_" not in name}
    plain_names = {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in whole}
    assert plain_names == {name for name in state if case.is_new(name)}
    assert all(".modules_to_save.default." in name for name in whole)
    adapted = {name.partition(".lora_A")[0].rpartition(".")[2] for name in trains if ".lora_A." in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    before = {name: parameter.clone() for name, parameter in parameters.items()}
    train_steps(model, 3, parameter_groups(model, Rates(learning_rate=1e-2)))
    assert {name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])} == trains
    trained = logits(model)
    assert not torch.allclose(trained, untrained, atol=1e-3)
    assert not torch.equal(logits(model, toy_scale=torch.zeros(2)), trained)

    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(toy_model(case, family, acting=False), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), trained)

    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-5)  # merging rounds once more
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.state_dict().keys() == state.keys()
    assert torch.equal(logits(loaded), logits(merged))
