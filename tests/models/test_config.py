"""Configs that hold memory: what travels through config.json and what is refused."""

import json
import types

import pytest
import torch
from models.fresh_process import run_python
from models.test_task_heads import kinds_of
from models.upscaled import memory_config, upscaled_model
from tiny import FAMILIES, NATIVE_FAMILIES, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from midus_hf.models import FAMILIES as MEMORY_FAMILIES

ENTRY = {"type": "headwise", "layers": [1, 4], "n": 8, "k": 3}


def config_of(family: str, **changes):
    fields = {**memory_config(tiny_model(family)).to_dict(), **changes}
    config_class = MEMORY_FAMILIES[FAMILIES[family].config_class.model_type].config_class
    return config_class(**{key: value for key, value in fields.items() if key != "model_type"})


def test_every_tested_family_hosts_memory_and_every_host_is_tested(tmp_path):
    # In a process of its own: here, other tests may have read families on demand.
    printed = run_python(
        "import midus_hf.models; print(*midus_hf.models.FAMILIES)", folder=tmp_path, package_present=True
    )
    assert {family.config_class.model_type for family in NATIVE_FAMILIES.values()} == set(printed.split())
    for model_type, model_class in MEMORY_FAMILIES.items():
        assert model_class.config_class.__bases__[-1].model_type == model_type
        assert model_class.config_class.model_type.startswith("midus_")


def test_memory_entries_and_every_other_field_travel_through_config_json(family, tmp_path):
    config = config_of(family, upscale={"method": "by hand", "new_layers": [1, 4]})
    assert config.memory == [ENTRY]
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["memory"] == [ENTRY]
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert again.memory == [ENTRY]
    assert again.upscale == {"method": "by hand", "new_layers": [1, 4]}
    ignored = {"_name_or_path", "transformers_version", "architectures", "dtype"}
    before, after = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (config, again))
    assert before == after
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("memory", [None, []])
def test_without_entries_the_model_is_the_family_s_own(family, memory, tmp_path):
    base = tiny_model(family)
    fields = {key: value for key, value in base.config.to_dict().items() if key != "model_type"}
    model_class = MEMORY_FAMILIES[base.config.model_type]
    model = model_class(model_class.config_class(**{**fields, "memory": memory})).eval()
    assert model.config.memory == []
    assert not [name for name, _ in model.named_modules() if name.endswith("memory")]
    assert model.load_state_dict(base.state_dict()).missing_keys == []
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).memory == []


def test_a_config_does_not_share_its_entries_with_the_caller(family):
    entry = {"type": "headwise", "layers": [1], "n": 8, "k": 3}
    config = config_of(family, memory=[entry])
    entry["n"] = 99
    entry["layers"].append(2)
    assert config.memory == [{"type": "headwise", "layers": [1], "n": 8, "k": 3}]


def test_wrong_memory_is_refused_when_the_config_is_made_and_when_it_is_read(family, tmp_path):
    """tests/config/test_memory_entries.py has every message."""
    memory, message = [{**ENTRY, "k": 9}], r"k is 9; expected 1 <= k <= n = 8"
    with pytest.raises(ValueError, match=message):
        config_of(family, memory=memory)
    config_of(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "memory": memory}))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_layer_types_count_the_blocks(family):
    config = config_of(family)
    base_types = tiny_model(family).config.layer_types
    assert len(config.layer_types) == config.num_hidden_layers == 6
    assert config.layer_types == [base_types[i] for i in (0, 1, 1, 2, 3, 3)]
    with pytest.raises(ValueError, match="layer_types has 4 entries; expected one for each of the 6 layers, memory"):
        config_of(family, layer_types=base_types)


def test_a_config_names_the_code_that_loads_it(family):
    config = config_of(family)
    name = type(config).__name__.removesuffix("Config")
    assert config.to_dict()["auto_map"] == {
        "AutoConfig": f"modeling_midus.{name}Config",
        "AutoModel": f"modeling_midus.{name}Model",
        "AutoModelForCausalLM": f"modeling_midus.{name}ForCausalLM",
        **{f"AutoModel{kind}": f"modeling_midus.{name}{kind}" for kind in kinds_of(family)},
    }


def test_importing_the_package_is_enough_for_the_auto_classes(tmp_path):
    for family in FAMILIES:
        upscaled_model(family).save_pretrained(tmp_path / family)
    printed = run_python(
        f"""
import midus_hf
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for family in {list(FAMILIES)}:
    names = [type(auto.from_pretrained(family)).__name__ for auto in (AutoConfig, AutoModel, AutoModelForCausalLM)]
    model_type = AutoConfig.from_pretrained(family).model_type
    print(family, *names, type(AutoModel.from_config(AutoConfig.from_pretrained(family))).__module__)
    assert type(AutoConfig.for_model(model_type)).__name__ == names[0]
""",
        tmp_path,
        package_present=True,
    )
    expected = []
    for family in FAMILIES:
        model = upscaled_model(family)
        names = (type(model.config).__name__, type(model.model).__name__, type(model).__name__)
        expected.append(" ".join([family, *names, type(model).__module__]))
    assert printed.splitlines() == expected


def test_no_plan_splits_a_model_over_processes(family):
    """A plan that split the head alone would cut a tied model where nothing else is cut."""
    model = upscaled_model(family)
    for module in (model, model.model):
        assert not module._tp_plan and not getattr(module, "_pp_plan", None) and not module.supports_tp_plan


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_plan": "auto"}, "tp_plan is 'auto'"),
        ({"tp_size": 2}, "tp_size is 2"),
        ({"distributed_config": {"tp_size": 2, "fsdp_size": 2}}, "tp_size is 2"),
        ({"distributed_config": {"pp_size": 2}}, "pp_size is 2"),
    ],
)
def test_parallelism_that_splits_a_model_is_refused(asked, message, tmp_path):
    upscaled_model("qwen2").save_pretrained(tmp_path)
    if "distributed_config" in asked:
        asked = {"distributed_config": types.SimpleNamespace(**asked["distributed_config"])}
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(
            ValueError, match=f"{message}, but a memory reads whole heads.*device_map, or train it with FSDP"
        ):
            auto.from_pretrained(tmp_path, **asked)


def test_building_a_model_twice_from_one_seed_gives_the_same_bytes(family):
    config = config_of(family)
    model_class = MEMORY_FAMILIES[type(config).__bases__[-1].model_type]
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(model_class(config).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    name = "model.layers.1.memory.row_keys"
    assert not torch.equal(states[0][name], states[2][name])
    assert not states[0]["model.layers.1.memory.value_bank"].any()
