"""What a training run may be told, and what it refuses."""

import re
from pathlib import Path

import pytest
from training.tiny_run import refused

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.training.options import CorpusOptions, TrainConfig

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c"}


@pytest.fixture
def recipe(tmp_path) -> Path:
    """Write a file with what a run cannot do without."""
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: m\noutput_dir: o\ncorpus: c\n", encoding="utf-8")
    return path


def test_a_file_and_words_after_it_make_one_config_and_words_win(recipe):
    recipe.write_text(
        "model_name_or_path: m\noutput_dir: o\ncorpus: c\nlearning_rate: 1e-4\nmax_steps: 7\n", encoding="utf-8"
    )
    words = ["max_steps=9", "warmup_ratio=0", "resume_from_checkpoint=true", "trainable=all", "save_total_limit=null"]
    options = {
        "learning_rate": 1e-4,
        "max_steps": 9,
        "warmup_ratio": 0.0,
        "resume_from_checkpoint": True,
        "trainable": "all",
    }
    expected = TrainConfig(
        model_name_or_path="m", output_dir="o", corpus=CorpusOptions(path="c"), save_total_limit=None, **options
    )
    assert read_config(TrainConfig, recipe, words) == expected


def test_a_model_that_is_made_from_a_config_trains_whole_unless_said_otherwise():
    begun = {"config_name": "c", "tokenizer_name": "t", "output_dir": "o", "corpus": "c"}
    assert from_mapping(TrainConfig, begun).trainable == "all"
    assert from_mapping(TrainConfig, {**begun, "trainable": [3]}).trainable == [3]


def test_layers_to_train_can_be_listed(recipe):
    assert read_config(TrainConfig, recipe).trainable == "auto"
    assert read_config(TrainConfig, recipe, ["trainable=[3, 7, 11]"]).trainable == [3, 7, 11]


def test_aids_to_memory_are_off_unless_asked_for(recipe):
    defaults = {"value_schedule": "constant", "value_decay_ratio": None, "balance_loss": 0.0, "usage_steps": None}
    config = read_config(TrainConfig, recipe)
    assert {name: getattr(config, name) for name in defaults} == defaults
    chosen = {"value_schedule": "4x-to-1x", "value_decay_ratio": 0.5, "balance_loss": 1e-2, "usage_steps": 50}
    config = read_config(TrainConfig, recipe, [f"{name}={value}" for name, value in chosen.items()])
    assert {name: getattr(config, name) for name in chosen} == chosen


def test_a_mapping_names_the_parts_of_a_corpus(recipe):
    recipe.write_text(
        "model_name_or_path: m\noutput_dir: o\nmax_steps: 1\ncorpus:\n  path: a/b\n  config: x\n  streaming: true"
    )
    assert read_config(TrainConfig, recipe).corpus == CorpusOptions(path="a/b", config="x", streaming=True)


def test_words_name_keys_of_adapters(recipe):
    recipe.write_text("model_name_or_path: m\noutput_dir: o\ncorpus: c\nadapters: {method: osf}\n")
    config = read_config(TrainConfig, recipe, ["adapters.effective_rank=0.5", "adapters.layers=new"])
    assert config.adapters == {"method": "osf", "effective_rank": 0.5, "layers": "new"}


COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "logging_steps",
)
COUNTS += ("usage_steps", "eval_steps", "eval_max_tokens", "early_stopping_patience")
BEGUN = {"model_name_or_path": None, "config_name": "c", "tokenizer_name": "t"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1}, "config has no option 'learning_rte'. Did you mean 'learning_rate'"),
        ({"zzz": 1}, "config has no option 'zzz'. Expected one of: model_name_or_path, config_name, "),
        ({"corpus": {"path": "c", "colum": "x"}}, "no option 'corpus.colum'. Did you mean 'column'"),
        ({"corpus": {"column": "x"}}, "config has no 'corpus.path'; set it in the file, or as corpus.path=... after it."),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; expected a number."),
        ({"max_steps": 1.5}, "max_steps is 1.5; expected a whole number or null."),
        ({"document_mask": 1}, "document_mask is 1; expected true or false."),
        ({"bf16": "yes"}, "bf16 is 'yes'; expected true or false."),
        ({"trainable": "nwe"}, "trainable is 'nwe'; expected 'auto' or 'new' or 'all' or a list, each item of it a "),
        ({"trainable": 3}, "trainable is 3; expected 'auto' or 'new' or 'all' or a list, each item of it a whole number"),
        ({"trainable": ["buffer"]}, "trainable[0] is 'buffer'; expected a whole number or 'key' or"),
        ({"trainable": [3, "x"]}, "trainable[1] is 'x'; expected a whole number or 'key' or"),
        ({"model_name_or_path": 3}, "model_name_or_path is 3; expected a string or null."),
        ({"resume_from_checkpoint": 3}, "resume_from_checkpoint is 3; expected true or false or a string."),
        ({"corpus": None}, "corpus is None; expected a mapping with path, config, split, column, "),
        ({"corpus": ""}, "corpus.path is ''; expected a value. Fill it in, or leave it out."),
        ({"corpus": {"path": "c", "shuffle_buffer": -1}}, "corpus.shuffle_buffer is -1; expected 0 or more documents."),
        ({"corpus": {"path": "c", "shuffle_buffer": 5}}, "corpus.shuffle_buffer needs corpus.streaming: true"),
        ({"corpus": {"path": "c", "streaming": True}}, "corpus.streaming needs max_steps"),
        ({"sequence_length": 1}, "sequence_length is 1; expected at least 2 tokens."),
        *(({name: 0}, f"{name} is 0; expected at least 1.") for name in COUNTS),
        ({"seed": -1}, "seed is -1; expected 0 or more."),
        *(({name: -0.1}, f"{name} is -0.1; expected 0 or more.") for name in ("balance_loss", "weight_decay", "max_grad_norm")),
        *(({name: 0}, f"{name} is 0.0; expected a number above 0.")
          for name in ("learning_rate", "value_learning_rate", "num_train_epochs")),
        ({"key_value_learning_rate": -1}, "key_value_learning_rate is -1.0; expected a number above 0."),
        ({"value_schedule": "4x"}, "value_schedule is '4x'; expected one of: constant, fixed, 4x-to-1x."),
        ({"value_transforms": "keys"}, "value_transforms is 'keys'; expected one of: weights, values."),
        ({"adam_beta2": 1}, "adam_beta2 is 1.0; expected 0 <= beta < 1."),
        ({"warmup_ratio": 1}, "warmup_ratio is 1.0; expected a share of the steps, 0 <= ratio < 1."),
        ({"max_steps": 2, "num_train_epochs": 1}, "max_steps is 2 and num_train_epochs is 1.0; give one of them."),
        *(({name: 5}, f"{name} is 5, which needs eval_text; set both or neither.") for name in ("eval_steps", "eval_max_tokens")),
        *(({"eval_text": "t", name: value}, f"{name} is {value}, which needs eval_steps; set both or neither.")
          for name, value in (("load_best_model_at_end", True), ("early_stopping_patience", 2))),
        ({"resume_from_checkpoint": True, "overwrite_output_dir": True}, "resume_from_checkpoint and overwrite_output_dir are both"),
        ({"config_name": "c"}, "model_name_or_path is 'm' and config_name is 'c'; expected one of them: model_name_or_path to"),
        (
            {**BEGUN, "tokenizer_name": None},
            "config has 'config_name' and no 'tokenizer_name'; set it to the folder or Hub id of a tokenizer",
        ),
        ({"tokenizer_name": "t"}, "tokenizer_name is 't', but a saved model has its own; leave it out, or set"),
        (
            {"adapters": {}, "trainable": "all"},
            "only adapters and new parts of the model train. Leave adapters out, or set trainable=auto.",
        ),
        ({"adapters": {}, "frozen": ["value"]}, "adapters is set and frozen is ['value']; "),
        (
            {"adapters": {}, **BEGUN},
            "adapters is set and config_name is 'c'; adapters are for weights that are trained already. Give ",
        ),
        ({"adapters": "osf"}, "adapters is 'osf'; expected a mapping or null."),
        (
            {"corpus": {"path": "x", "path_column": "memory_ids", "streaming": True}},
            "corpus.path_column and corpus.streaming are given; expected one of them",
        ),
        ({"tree": "x"}, "tree is 'x', and no corpus has a path_column; expected the column with the paths"),
        *(({"generic_share": share}, f"generic_share is {share}; expected a share from 0 to 1") for share in (-0.1, 1.5)),
        *(({"max_seconds": seconds}, f"max_seconds is {float(seconds)}; expected a number above 0.") for seconds in (0, -1)),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_was_expected(values, message):
    with refused(re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, **values})


@pytest.mark.parametrize("missing", [key for key in NEEDED if key != "output_dir"])
def test_what_a_run_cannot_do_without_is_asked_for(missing):
    more = " To train a model from the beginning, set config_name and" if missing == "model_name_or_path" else ""
    message = f"config has no '{missing}'; set it in the file, or as {missing}=... after it.{more}"
    with refused(re.escape(message)):
        from_mapping(TrainConfig, {key: value for key, value in NEEDED.items() if key != missing})


def test_an_empty_path_is_refused_from_python_as_well():
    with refused(r"corpus\.path is empty; expected a file, a folder or a dataset id\."):
        CorpusOptions(path="")
