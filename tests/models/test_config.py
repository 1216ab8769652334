"""Configs that hold memory: what travels through config.json and what is refused."""

import json
import types

import pytest
import torch
from models.hosting import host_config
from models.test_task_heads import kinds_of
from models.upscaled import memory_config, upscaled_model
from tiny import logits, prompt, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from midus_hf.memories.module import MemoryModule
from midus_hf.models import FAMILIES as MEMORY_FAMILIES

ENTRY = {"type": "midus-hml", "layers": [1, 4], "n": 8, "k": 3}


def config_of(family: str, **changes):
    config = memory_config(tiny_model(family))
    fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    return type(config)(**{**fields, **changes})


def test_every_config_field_survives_config_json(family, tmp_path):
    config = config_of(family, upscale={"method": "by hand", "new_layers": [1, 4]})
    assert config.memory == [ENTRY]
    config.save_pretrained(tmp_path)
    saved, name = json.loads((tmp_path / "config.json").read_text()), type(config).__name__.removesuffix("Config")
    assert saved["memory"] == [ENTRY]
    models = {f"AutoModel{kind}": kind for kind in ("ForCausalLM", *kinds_of(family))}
    classes = {"AutoConfig": "Config", "AutoModel": "Model", **models}
    assert saved["auto_map"] == {auto: f"modeling_midus.{name}{kind}" for auto, kind in classes.items()}
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert again.memory == [ENTRY]
    assert again.upscale == config.upscale
    ignored = {"_name_or_path", "transformers_version", "architectures", "dtype"}
    before, after = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (config, again))
    assert before == after
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("memory", [None, []])
def test_model_without_entries_is_the_family_s(family, memory, tmp_path):
    base = tiny_model(family)
    model = MEMORY_FAMILIES[base.config.model_type](host_config(base.config, memory)).eval()
    model.load_state_dict(base.state_dict())
    assert torch.equal(logits(model, prompt()), logits(base, prompt()))
    model.save_pretrained(tmp_path)
    assert model.config.memory == AutoConfig.from_pretrained(tmp_path).memory == []


def test_config_copies_the_entries_it_is_given():
    entry = {**ENTRY, "layers": [1]}
    config = config_of("llama", memory=[entry])
    entry["n"] = 99
    entry["layers"].append(2)
    assert config.memory == [{**ENTRY, "layers": [1]}]


def test_wrong_memory_is_refused_when_made_and_when_read(tmp_path):
    """tests/config/test_memory_types.py has every message."""
    memory, message, path = [{**ENTRY, "k": 9}], r"k is 9; expected 1 <= k <= n = 8", tmp_path / "config.json"
    with pytest.raises(ValueError, match=message):
        config_of("llama", memory=memory)
    config_of("llama").save_pretrained(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "memory": memory}))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_layer_types_count_the_blocks(family):
    config, base_types = config_of(family), tiny_model(family).config.layer_types
    assert len(config.layer_types) == config.num_hidden_layers == 6
    assert config.layer_types == [base_types[i] for i in (0, 1, 1, 2, 3, 3)]
    with pytest.raises(ValueError, match="layer_types has 4 entries; expected one for each of the 6 layers, memory"):
        config_of(family, layer_types=base_types)


def test_no_plan_splits_a_model_over_processes(family):
    """A plan that split only the head would cut a tied model where nothing else is cut."""
    model = upscaled_model(family)
    for module in (model, model.model):
        assert not module._tp_plan
        assert not getattr(module, "_pp_plan", None)
        assert not module.supports_tp_plan


SPLITS = [
    ({"tp_plan": "auto"}, "tp_plan is 'auto'"),
    ({"tp_size": 2}, "tp_size is 2"),
    ({"distributed_config": types.SimpleNamespace(tp_size=2, fsdp_size=2)}, "tp_size is 2"),
    ({"distributed_config": types.SimpleNamespace(pp_size=2)}, "pp_size is 2"),
]


@pytest.mark.parametrize(("asked", "message"), SPLITS)
def test_parallelism_that_splits_a_model_is_refused(asked, message, tmp_path):
    upscaled_model("qwen2").save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=f"{message}, but a memory .*device_map, or train it with FSDP"):
            auto.from_pretrained(tmp_path, **asked)


class _AsTorchaoDoes(torch.nn.Parameter):
    """A parameter of another class, as torchao's are."""


def test_quantised_tensors_of_memories_are_refused(tmp_path, monkeypatch):
    upscaled_model("llama").save_pretrained(tmp_path)
    loads = PreTrainedModel.from_pretrained.__func__

    def load(cls, *args, **kwargs):
        model = loads(cls, *args, **kwargs)
        memory = next(module for module in model.modules() if isinstance(module, MemoryModule))
        memory.value_bank = _AsTorchaoDoes(memory.value_bank.data)
        model.hf_quantizer = object()
        return model

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    with pytest.raises(ValueError, match=r"has made a _AsTorchaoDoes of .*value_bank.*expected only linear layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
