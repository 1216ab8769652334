"""What a run of fine-tuning may be told, and what it refuses."""

import re

import pytest
from training.tiny_run import refused

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.sft.options import DataOptions, SftConfig

NEEDED = {"model": "m", "output": "o", "data": "d"}


def test_a_path_stands_for_the_data_and_a_mapping_names_its_parts(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model: m\noutput: o\ndata: d\nlearning_rate: 1e-5\n")
    assert read_config(SftConfig, path).data == DataOptions(path="d")
    config = read_config(SftConfig, path, ["data.format=alpaca", "adapters.r=4", "packing=true"])
    assert config.data == DataOptions(path="d", format="alpaca") and config.adapters == {"r": 4}
    assert (config.learning_rate, config.packing, config.assistant_only_loss) == (1e-5, True, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": ""}, "data.path is ''; expected a value. Fill it in, or leave it out."),
        ({"corpus": "c"}, "config has no option 'corpus'."),
        ({"sequence_length": 1}, "sequence_length is 1; expected at least 2 tokens."),
        (
            {"adapters": {}, "trainable": [3]},
            "adapters is set and trainable is [3]; with adapters, adapters and what is new",
        ),
        ({"adapters": {}, "frozen": ["value"]}, "adapters is set and frozen is ['value']; "),
        ({"lora": {"r": 4}}, "config has no option 'lora'."),
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
