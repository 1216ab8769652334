"""What a training run may be told, and what it refuses."""

import re
from pathlib import Path

import pytest

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.training.options import CorpusOptions, TrainConfig

NEEDED = {"model": "m", "output": "o", "corpus": "c"}


def write(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_and_words_after_it_make_one_config_and_words_win(tmp_path):
    path = write(tmp_path, "model: m\noutput: o\ncorpus: c\nlearning_rate: 1e-4\nmax_steps: 7\n")
    config = read_config(TrainConfig, path, ["max_steps=9", "warmup_ratio=0", "resume=true", "trainable=all"])
    assert config == TrainConfig(
        model="m",
        output="o",
        corpus=CorpusOptions(path="c"),
        learning_rate=1e-4,
        max_steps=9,
        warmup_ratio=0.0,
        resume=True,
        trainable="all",
    )


def test_a_model_that_is_made_from_a_config_trains_whole_unless_said_otherwise():
    begun = {"model_config": "c", "tokenizer": "t", "output": "o", "corpus": "c"}
    assert from_mapping(TrainConfig, begun).trainable == "all"
    assert from_mapping(TrainConfig, {**begun, "trainable": [3]}).trainable == [3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {},
            "config has no 'model'; set it in the file, or as model=.* To train one from the beginning, set model_config and",
        ),
        (
            {"model": "m", "model_config": "c"},
            "model is 'm' and model_config is 'c'; expected one of them: model to train a",
        ),
        ({"model_config": "c"}, "config has 'model_config' and no 'tokenizer'; set it to the folder or Hub id of one"),
        ({"model": "m", "tokenizer": "t"}, "tokenizer is 't', but a saved model has its own; leave it out, or set"),
    ],
)
def test_a_run_has_one_origin(given, message):
    with pytest.raises(ValueError, match=message):
        from_mapping(TrainConfig, {"output": "o", "corpus": "c", **given})


def test_layers_to_train_can_be_listed(tmp_path):
    path = write(tmp_path, "model: m\noutput: o\ncorpus: c\n")
    assert read_config(TrainConfig, path).trainable == "auto"
    assert read_config(TrainConfig, path, ["trainable=[3, 7, 11]"]).trainable == [3, 7, 11]


def test_aids_to_memory_are_off_unless_asked_for(tmp_path):
    path = write(tmp_path, "model: m\noutput: o\ncorpus: c\n")
    config = read_config(TrainConfig, path)
    assert (config.value_schedule, config.balance_loss, config.usage_every) == ("constant", 0.0, None)
    config = read_config(
        TrainConfig, path, ["value_schedule=4x-to-1x", "value_decay_ratio=0.5", "balance_loss=1e-2", "usage_every=50"]
    )
    assert (config.value_schedule, config.balance_loss, config.usage_every) == ("4x-to-1x", 0.01, 50)
    assert config.value_decay_ratio == 0.5


def test_null_stands_for_no_limit(tmp_path):
    config = read_config(TrainConfig, write(tmp_path, "model: m\noutput: o\ncorpus: c"), ["keep_checkpoints=null"])
    assert config.keep_checkpoints is None


def test_a_mapping_names_the_parts_of_a_corpus(tmp_path):
    path = write(tmp_path, "model: m\noutput: o\nmax_steps: 1\ncorpus:\n  path: a/b\n  config: x\n  streaming: true")
    assert read_config(TrainConfig, path).corpus == CorpusOptions(path="a/b", config="x", streaming=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1}, "config has no option 'learning_rte'. Did you mean 'learning_rate'"),
        ({"zzz": 1}, "config has no option 'zzz'. Expected one of: model, model_config, tokenizer, output, "),
        ({"corpus": {"path": "c", "colum": "x"}}, "no option 'corpus.colum'. Did you mean 'column'"),
        (
            {"corpus": {"column": "x"}},
            "config has no 'corpus.path'; set it in the file, or as corpus.path=... after it.",
        ),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; expected a number."),
        ({"max_steps": 1.5}, "max_steps is 1.5; expected a whole number or null."),
        ({"document_mask": 1}, "document_mask is 1; expected true or false."),
        ({"precision": "fp16"}, "precision is 'fp16'; expected one of: bf16, fp32."),
        ({"trainable": "nwe"}, "trainable is 'nwe'; expected 'auto' or 'new' or 'all' or a list, each item of it a "),
        (
            {"trainable": 3},
            "trainable is 3; expected 'auto' or 'new' or 'all' or a list, each item of it a whole number or 'key' or",
        ),
        ({"trainable": [3, "x"]}, "trainable[1] is 'x'; expected a whole number or 'key' or"),
        ({"model": 3}, "model is 3; expected a string or null."),
        ({"resume": 3}, "resume is 3; expected true or false or a string."),
        ({"corpus": None}, "corpus is None; expected a mapping with path, config, split, column, "),
        ({"corpus": ""}, "corpus.path is ''; expected a value. Fill it in, or leave it out."),
        (
            {"corpus": {"path": "c", "shuffle_buffer": -1}},
            "corpus.shuffle_buffer is -1; expected 0 or more documents.",
        ),
        ({"corpus": {"path": "c", "shuffle_buffer": 5}}, "corpus.shuffle_buffer needs corpus.streaming: true"),
        ({"corpus": {"path": "c", "streaming": True}}, "corpus.streaming needs max_steps"),
        ({"sequence_length": 1}, "sequence_length is 1; expected at least 2 tokens."),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1."),
        ({"gradient_accumulation": 0}, "gradient_accumulation is 0; expected at least 1."),
        ({"max_steps": 0}, "max_steps is 0; expected at least 1."),
        ({"save_every": 0}, "save_every is 0; expected at least 1."),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0; expected at least 1."),
        ({"log_every": 0}, "log_every is 0; expected at least 1."),
        ({"usage_every": 0}, "usage_every is 0; expected at least 1."),
        ({"balance_loss": -0.1}, "balance_loss is -0.1; expected 0 or more."),
        ({"value_schedule": "4x"}, "value_schedule is '4x'; expected one of: constant, fixed, 4x-to-1x."),
        ({"value_transforms": "keys"}, "value_transforms is 'keys'; expected one of: weights, values."),
        ({"learning_rate": 0}, "learning_rate is 0.0; expected a number above 0."),
        ({"key_value_learning_rate": -1}, "key_value_learning_rate is -1.0; expected a number above 0."),
        ({"value_learning_rate": 0}, "value_learning_rate is 0.0; expected a number above 0."),
        ({"adam_beta2": 1}, "adam_beta2 is 1.0; expected 0 <= beta < 1."),
        ({"epochs": 0}, "epochs is 0.0; expected a number above 0."),
        ({"weight_decay": -1}, "weight_decay is -1.0; expected 0 or more."),
        ({"max_grad_norm": -1}, "max_grad_norm is -1.0; expected 0 or more."),
        ({"seed": -1}, "seed is -1; expected 0 or more."),
        ({"warmup_ratio": 1}, "warmup_ratio is 1.0; expected a share of the steps, 0 <= ratio < 1."),
        ({"max_steps": 2, "epochs": 1}, "max_steps is 2 and epochs is 1.0; give one of them."),
        ({"eval_every": 0}, "eval_every is 0; expected at least 1."),
        ({"eval_max_tokens": 0}, "eval_max_tokens is 0; expected at least 1."),
        ({"early_stop": 0}, "early_stop is 0; expected at least 1."),
        ({"eval_every": 5}, "eval_every is 5, which needs eval_text; set both or neither."),
        ({"eval_max_tokens": 5}, "eval_max_tokens is 5, which needs eval_text; set both or neither."),
        ({"eval_text": "t", "keep_best": True}, "keep_best is True, which needs eval_every; set both or neither."),
        ({"eval_text": "t", "early_stop": 2}, "early_stop is 2, which needs eval_every; set both or neither."),
        ({"resume": True, "overwrite": True}, "resume and overwrite are both set"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, **values})


@pytest.mark.parametrize("missing", NEEDED)
def test_what_a_run_cannot_do_without_is_asked_for(missing):
    with pytest.raises(
        ValueError, match=f"config has no '{missing}'; set it in the file, or as {missing}=... after it."
    ):
        from_mapping(TrainConfig, {key: value for key, value in NEEDED.items() if key != missing})


def test_words_name_keys_of_adapters(tmp_path):
    path = write(tmp_path, "model: m\noutput: o\ncorpus: c\nadapters: {method: osf}\n")
    config = read_config(TrainConfig, path, ["adapters.effective_rank=0.5", "adapters.layers=new"])
    assert config.adapters == {"method": "osf", "effective_rank": 0.5, "layers": "new"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"trainable": "all"},
            "adapters is set and trainable is 'all'; with adapters, adapters and what is new in the model train. Leave one of them",
        ),
        ({"frozen": ["value"]}, "adapters is set and frozen is ['value']; "),
        (
            {"model": None, "model_config": "c", "tokenizer": "t"},
            "adapters is set and model_config is 'c'; adapters are for weights that are trained already. Give model, or leave them",
        ),
        ({"adapters": "osf"}, "adapters is 'osf'; expected a mapping or null."),
    ],
    ids=["trainable", "frozen", "config", "no-mapping"],
)
def test_what_else_says_what_trains_is_refused_beside_adapters(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, "adapters": {}, **given})


def test_an_empty_path_is_refused_from_python_as_well():
    with pytest.raises(ValueError, match=r"corpus\.path is empty; expected a file, a folder or a dataset id\."):
        CorpusOptions(path="")
