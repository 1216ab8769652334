"""What a run of fine-tuning may be told, and what it refuses."""

import re

import pytest
from training.tiny_run import refused

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.sft.options import SftConfig

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "dataset_name": "d"}


def test_a_recipe_is_read_with_words_that_replace_its_keys(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: m\noutput_dir: o\ndataset_name: d\nlearning_rate: 1e-5\n")
    assert read_config(SftConfig, path).dataset_name == "d"
    config = read_config(SftConfig, path, ["dataset_format=alpaca", "adapters.r=4", "packing=true"])
    assert (config.dataset_name, config.dataset_format, config.adapters) == ("d", "alpaca", {"r": 4})
    assert (config.learning_rate, config.packing, config.assistant_only_loss) == (1e-5, True, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset_name": ""}, "dataset_name is ''; expected a value. Fill it in, or leave it out."),
        ({"corpus": "c"}, "config has no option 'corpus'."),
        ({"max_length": 1}, "max_length is 1; expected at least 2 tokens."),
        (
            {"adapters": {}, "trainable": [3]},
            "adapters is set and trainable is [3]; with adapters, only adapters and new",
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


def test_an_empty_data_set_is_refused_from_python_as_well():
    with refused(r"dataset_name is empty; expected a file, a folder or a dataset id\."):
        SftConfig(**{**NEEDED, "dataset_name": ""})


def test_a_model_card_tells_no_local_paths(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    config = SftConfig(
        model_name_or_path="m", output_dir="o", dataset_name=str(tmp_path / "rows.jsonl"), chat_template="chatml"
    )
    shared = config.to_share(lambda name: name.rpartition("/")[2])
    assert (shared.dataset_name, shared.chat_template) == ("rows.jsonl", "chatml")
