"""What a run of fine-tuning may be told, and what it refuses."""

import re

import pytest
from training.tiny_run import refused

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.sft.options import DataOptions, LoraOptions, SftConfig

NEEDED = {"model": "m", "output": "o", "data": "d"}


def test_a_path_stands_for_the_data_and_a_mapping_names_its_parts(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model: m\noutput: o\ndata: d\nlearning_rate: 1e-5\n")
    assert read_config(SftConfig, path).data == DataOptions(path="d")
    config = read_config(SftConfig, path, ["data.format=alpaca", "lora.r=4", "packing=true"])
    assert config.data == DataOptions(path="d", format="alpaca") and config.lora == LoraOptions(r=4)
    assert (config.learning_rate, config.packing, config.assistant_only_loss) == (1e-5, True, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": ""}, "data.path is ''; expected a value. Fill it in, or leave it out."),
        ({"corpus": "c"}, "config has no option 'corpus'."),
        ({"sequence_length": 1}, "sequence_length is 1; expected at least 2 tokens."),
        ({"lora": {"r": 0}}, "lora.r is 0; expected at least 1."),
        ({"lora": {"alpha": 0}}, "lora.alpha is 0; expected at least 1."),
        ({"lora": {"dropout": 1}}, "lora.dropout is 1.0; expected 0 <= share < 1."),
        (
            {"lora": {}, "trainable": "all"},
            "lora is set and trainable is 'all'; with lora, adapters and what is new in the model",
        ),
        (
            {"lora": {}, "adapters": {}},
            "lora and adapters are both set; lora is a short form of adapters. Leave one out.",
        ),
        (
            {"adapters": {}, "trainable": [3]},
            "adapters is set and trainable is [3]; with adapters, adapters and what is new",
        ),
        ({"lora": {}, "trainable": [3]}, "lora is set and trainable is [3]; "),
        ({"lora": {}, "frozen": ["value"]}, "lora is set and frozen is ['value']; "),
        ({"learning_rate": 0}, "learning_rate is 0.0; expected a number above 0."),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; expected at least 1."),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(values, message):
    with refused(re.escape(message)):
        from_mapping(SftConfig, {**NEEDED, **values})


def test_a_model_card_tells_no_local_paths(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    config = SftConfig(
        model="m", output="o", data=DataOptions(path=str(tmp_path / "rows.jsonl")), chat_template="chatml"
    )
    shared = config.to_share(lambda name: name.rpartition("/")[2])
    assert (shared.data.path, shared.chat_template) == ("rows.jsonl", "chatml")


def test_the_short_form_of_adapters_stands_for_their_keys_of_peft():
    short = from_mapping(SftConfig, {**NEEDED, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}})
    assert short.chosen_adapters == {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    whole = from_mapping(SftConfig, {**NEEDED, "adapters": {"method": "osf"}})
    assert whole.chosen_adapters == {"method": "osf"}
    assert from_mapping(SftConfig, NEEDED).chosen_adapters is None


def test_an_empty_path_is_refused_from_python_as_well():
    with refused(r"data\.path is empty; expected a file, a folder or a dataset id\."):
        DataOptions(path="")
