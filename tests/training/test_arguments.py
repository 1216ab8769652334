"""What a training run may be told, and what it refuses."""

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest
import torch
from training.tiny_run import PreparedRun

from midus_hf.cli import sft
from midus_hf.cli.run_arguments import RunParser, read_arguments
from midus_hf.cli.train import main
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training import arguments
from midus_hf.training.arguments import TrainArguments, computes_bfloat16
from midus_hf.training.keys import SftKeys, TrainKeys
from midus_hf.training.sft import SftArguments

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "bf16": False}


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in NEEDED.items()))
    return path


def test_saving_measuring_and_what_trains_follow_other_keys():
    begun = {"config_name": "c", "tokenizer_name": "t", "output_dir": "o", "corpus": "c", "bf16": False}
    assert from_mapping(TrainArguments, begun).trainable == "all"
    assert from_mapping(TrainArguments, {**begun, "trainable": [3]}).trainable == [3]
    read = from_mapping(TrainArguments, {**NEEDED, "save_steps": 5, "eval_steps": 5, "eval_text": "t"})
    assert (read.save_strategy, read.eval_strategy) == ("steps", "steps")
    read = from_mapping(TrainArguments, {**NEEDED, "save_strategy": "epoch"})
    assert (read.save_strategy, read.eval_strategy) == ("epoch", "no")
    measured = [{"eval_text": "t"}, {"eval_text": "t", "eval_strategy": "no"}]  # a person's word counts
    read = [from_mapping(TrainArguments, {**NEEDED, **keys}) for keys in measured]
    assert [one.eval_strategy for one in read] == ["epoch", "no"]
    assert [from_mapping(TrainArguments, one.recorded()).eval_strategy for one in read] == ["epoch", "no"]


def test_home_paths_are_expanded_and_recorded_with_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    read = from_mapping(TrainArguments, {**NEEDED, "model_name_or_path": "~/m", "corpus": [f"{tmp_path}/c"]})
    assert read.model_name_or_path == str(tmp_path / "m")
    assert (read.recorded()["model_name_or_path"], read.recorded()["corpus"]) == ("~/m", ["~/c"])


def test_no_form_of_arguments_shows_a_secret_and_a_copy_keeps_it():
    read = from_mapping(TrainArguments, {**NEEDED, "hub_token": "opensesame", "run_name": "hf_Planted0Planted1"})
    read.fsdp_config = {"api_key": "opensesame"}
    copied = pickle.loads(pickle.dumps(read))
    for shown in (str(read), repr(read), repr(read.recorded()), read.to_json_string(), repr(copied)):
        assert "<hidden>" in shown and "opensesame" not in shown and "Planted" not in shown
    assert copy.copy(read).hub_token == "opensesame"


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (["--adapters", '{"r": 8, "layers": "all"}'], "adapters", {"r": 8, "layers": "all"}),
        (["--corpus", "a", "b"], "corpus", ["a", "b"]),
        (["--protect", "a"], "protect", ["a"]),
        (["--protect=[a, b]"], "protect", ["a", "b"]),
        (["--eval_text", "{x: a}"], "eval_text", {"x": "a"}),
        (["--trainable", "[value]"], "trainable", ["value"]),
        (["--resume_from_checkpoint", "checkpoint-3"], "resume_from_checkpoint", "checkpoint-3"),
        (["--resume_from_checkpoint", "True"], "resume_from_checkpoint", True),
        (["--include_num_input_tokens_seen", "non_padding"], "include_num_input_tokens_seen", "non_padding"),
        (["--report_to", "None"], "report_to", []),
        (["--push_to_hub"], "push_to_hub", True),
        (["--no_average_tokens_across_devices"], "average_tokens_across_devices", False),
        (["--run_name", "[a] b"], "run_name", "[a] b"),
        (["--model", "n"], "model_name_or_path", "n"),
    ],
    ids=str,
)
def test_a_flag_gives_a_value_of_the_type_of_its_key(flags, key, expected, recipe):
    value = getattr(read_arguments(TrainArguments, [str(recipe), *flags]), key)
    assert value == expected and type(value) is type(expected)


def test_adapters_flag_replaces_trainable_with_a_note(recipe, capsys):
    with recipe.open("a") as file:
        file.write("\ntrainable: new\n")
    arguments = read_arguments(TrainArguments, [str(recipe), "--adapters", "{r: 8}"])
    assert (arguments.trainable, arguments.adapters) == ("auto", {"r": 8})
    assert f"--adapters replaces trainable: new of {recipe}\n" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["010", "1_000", "0x10", "0o10", "1e3", "12.0"])
def test_flag_gives_the_number_that_a_recipe_gives(word, recipe):
    read = read_arguments(TrainArguments, [str(recipe), "--max_steps", word, "--learning_rate", word])
    with recipe.open("a") as file:
        file.write(f"\nmax_steps: {word}\nlearning_rate: {word}\n")
    of_recipe = read_arguments(TrainArguments, [str(recipe)])
    numbers = {"010": 10, "0x10": 16, "0o10": 8, "12.0": 12}
    assert read.max_steps == of_recipe.max_steps == read.learning_rate == numbers.get(word, 1000)
    assert type(read.max_steps) is int and type(of_recipe.learning_rate) is float


@pytest.mark.parametrize("kind", [TrainArguments, SftArguments])
def test_numbers_within_mappings_are_numbers(kind, recipe):
    text, values = recipe.read_text().replace("corpus", kind.data_key), "{min_lr: 1e-6, num_cycles: 010}"
    for line, flags in ((f"lr_scheduler_kwargs: {values}", []), ("", ["--lr_scheduler_kwargs", values])):
        recipe.write_text(f"{text}\n{line}\n")
        read = read_arguments(kind, [str(recipe), *flags])
        assert read.lr_scheduler_kwargs == {"min_lr": 1e-6, "num_cycles": 10}


@pytest.mark.parametrize(("main", "kind", "recomputes"), [(sft.main, SftKeys, "true"), (main, TrainKeys, "false")])
def test_help_describes_our_keys_once(main, kind, recomputes, capsys):
    assert main(["texts", "--help"]) == 0
    shown = capsys.readouterr().out
    entries = dict(re.findall(r"^  --(\w+) (.*(?:\n {10}.*)*)", shown, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(kind)}
    assert entries.keys() - {"no_assistant_only_loss"} == {*fields, "model", "output"}
    assert all(entries[name].count("Default:") == 1 for name in fields) and "(default:" not in shown
    assert entries["activation_checkpointing"].endswith(f"Default: {recomputes}.")
    end = " ".join(shown.split()).partition(" work too, spelled as there, among them ")[2]
    assert {*re.findall(r"\w*_\w+", end)} <= {field.name for field in dataclasses.fields(TrainArguments)}
    assert end.endswith(f" midus {kind.command} --help=all lists all.")


def test_every_key_is_described_in_the_help_that_lists_all(capsys):
    assert main(["--help=all"]) == 0
    printed, noted = capsys.readouterr()
    shown = " ".join(printed.split())
    assert noted == "reading the Trainer's keys ...\n"
    assert shown.startswith("usage: midus train TEXTS|RECIPE [--KEY VALUE ...] Train a model on text")
    assert all(f" --{field.name}" in shown for field in dataclasses.fields(TrainArguments) if field.init)
    assert "--sequence_length VALUE T, tokens per sequence. Default: 2048. Without a recipe: 256. --" in shown
    assert "Default: 1e-4. Without a recipe: 0.001 if only new parameters or adapters train. --" in shown
    assert "--no_average_tokens_across_devices Same as --average_tokens_across_devices false. --" in shown
    assert all(action.help for action in RunParser(SftArguments)._actions)


@pytest.mark.parametrize("able", [True, False])
def test_bfloat16_is_the_default_where_the_device_computes_it(able, config_for, monkeypatch, capsys):
    monkeypatch.setattr(arguments, "computes_bfloat16", lambda use_cpu: able)
    read = from_mapping(TrainArguments, {**NEEDED, "bf16": None})
    assert (read.bf16, read.chooses_bf16, read.recorded().get("bf16")) == (able, True, True if able else None)
    for options in ({"bf16": True}, {"bf16": False}, {"bf16": None, "fp16": True}):
        read = from_mapping(TrainArguments, {**NEEDED, **options})
        assert (read.bf16, read.chooses_bf16) == (bool(options["bf16"]), False)
        assert read.recorded().get("bf16") == options["bf16"], "what was asked for is recorded"
    assert not any(capsys.readouterr()), "arguments are also read where nothing trains"
    PreparedRun(config_for(bf16=None))
    printed = capsys.readouterr().out
    counts = [printed.count(f"this device {words} bfloat16: ") for words in ("computes", "does not compute")]
    assert counts == [int(able), int(not able)]


@pytest.mark.parametrize(
    ("capabilities", "able"), [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False)]
)
def test_a_processor_is_asked_for_its_instructions(capabilities, able, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert computes_bfloat16(use_cpu=True) is able
