"""What a run may be told, and is refused: the value and what to do, before a model is loaded where that is possible."""

import copy
import dataclasses
import math
import pickle
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.tiny_run import PreparedRun, refused, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf.cli.run_arguments import RunParser, read_arguments
from midus_hf.cli.sft import main as sft
from midus_hf.cli.train import main
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training import arguments
from midus_hf.training.arguments import TrainArguments, computes_bfloat16
from midus_hf.training.keys import Rates, SftKeys, TrainKeys
from midus_hf.training.optim import parameter_groups, resolve_trainable, set_trainable
from midus_hf.training.sft.run import SftArguments
from midus_hf.training.trainer import MemoryTrainer

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "bf16": False}


def read_flags(get, flags):
    recipe = get("tmp_path") / "train.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in NEEDED.items()) + (flags.pop(0) + "\n"))
    read_arguments(TrainArguments, [str(recipe), *flags])


def prepare_run(get, keys):
    """Prepare a run; `model` is a method, or the base without its weights, and `without` a package that is absent."""
    if "without" in keys:
        get("without")(keys["without"])
    folder, model, bare = get("tmp_path"), keys.get("model", "midus-hml"), get("upscaled")().parent / "base"
    if model == "bare":
        shutil.copytree(bare, folder / "bare").joinpath("model.safetensors").unlink()
    for name in ("file", "texts/000.txt", "full/thesis.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("w3 w4 " * 20)
    (folder / "blank.txt").write_text(" ")
    (folder / "short.jsonl").write_text('{"text": "w4 w5 w6"}')
    keys = {name: value for name, value in keys.items() if name not in ("model", "without")}
    PreparedRun(
        get("config_for")(model=folder / "bare" if model == "bare" else get("upscaled")("llama", model), **keys)
    )


def load_spoilt(get, keys):
    model = shutil.copytree(get("upscaled")(), get("tmp_path") / "model")
    keys["spoil"](model)
    PreparedRun(get("config_for")(model=model))


def without_values(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.memory.value_bank"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def as_pointer(name):
    return {"spoil": lambda model: (model / name).write_text("version https://git-lfs.github.com/spec/v1\n")}


def choose_trained(get, keys):
    model = AutoModelForCausalLM.from_pretrained(get(keys.get("kind", "upscaled"))("llama"))
    if "upscale" in keys:
        model.config.upscale = keys["upscale"]
    try:
        set_trainable(model, *(keys[key] for key in ("trainable", "frozen") if key in keys))
    finally:
        assert keys.get("kind") != "native" or all(parameter.requires_grad for parameter in model.parameters())


def make_trainer(get, keys):
    """Make a trainer of the model of a method by changed arguments, and with what it may be given."""
    method, arguments, more = keys
    model = AutoModelForCausalLM.from_pretrained(get("upscaled")("llama", method))
    set_trainable(model, "auto")
    options = tiny_config(None, get("corpus"), get("tmp_path"), config_name="c", tokenizer_name="t")
    vars(options).update(arguments)
    MemoryTrainer(model, options, **more)


PACKED = {"model_type": "midus_llama", "num_hidden_layers": 2, "memory": [{"type": "packs", "layers": [0]}]}
ADDED = {"trainable": "new", "new_layers": [], "new_memories": ["packs"]}
CALLS = {
    "flags": read_flags,
    "values": lambda get, keys: from_mapping(TrainArguments, {**NEEDED, **keys}),
    "run": prepare_run,
    "blocks": lambda get, keys: PreparedRun(get("blocks_for")(**keys)),
    "new model": lambda get, keys: PreparedRun(get("begun")(**keys)),
    "spoilt": load_spoilt,
    "trainable": choose_trained,
    "packs": lambda get, keys: resolve_trainable(AutoConfig.for_model(**PACKED, upscale=ADDED), "auto"),
    "groups": lambda get, keys: parameter_groups(torch.nn.Linear(2, 2).requires_grad_(False), Rates()),
    "trainer": make_trainer,
}
BEGUN = {"model_name_or_path": None, "config_name": "c", "tokenizer_name": "t"}
STREAM, KL = {"streaming": True, "shuffle_buffer": 5}, {"base_kl": 0.3}
OF_A_CLASS = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}
MADE = {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}
ROWS = {"sparse_values": True}
NO_MODEL = "^model_name_or_path is '.*model'.*expected the folder or Hub id of a language model: "
IS_POINTER = "of .*model is a Git LFS pointer.*Run git lfs pull"
IMAGES = AutoConfig.for_model("vit", vocab_size=128, max_position_embeddings=128)
PACKS = AutoConfig.for_model(**PACKED)
FLASH = pytest.mark.skipif(any(map(find_spec, ("flash_attn", "kernels"))), reason="it may be had here")

# What is asked for, how, and what is said.
REQUESTS = [
    # A line of the recipe, and flags.
    ("flags", ["", "--max_steps", "1:30"], "max_steps is '1:30'; expected a whole"),
    ("flags", ["", "--max_steps"], "--max-steps: expected one argument"),
    ("flags", ["", "--value_schedule", "4x"], "--value-schedule: invalid choice: '4x'"),
    ("flags", ["", "--adapters", "{r: 1, r: 2}"], "--adapters has 'r' twice"),
    ("flags", ["", "--adapters", "{r: 8}", "--trainable", "new"], "adapters is set and trainable is 'new'"),
    ("flags", ["", "--seed", "null"], "seed is None; expected a whole"),
    ("flags", ["", "--trainable", "null"], "trainable is None; expected 'auto'"),
    ("flags", ["", "--max_step=1", "--output-dri", "o"], "mean --max_steps.*mean --output_dir.*Expected --KEY VALUE"),
    ("flags", ["save_strategy: no"], "save_strategy is False; expected a string.*Put text that YAML reads"),
    ("flags", ["logging_strategy: no"], "logging_strategy is False; expected one of: no"),
    ("values", {"warmup_ratio": 0.1}, "no option 'warmup_ratio'.*one of: output_dir"),
    ("values", {"trainable": "nwe"}, "trainable is 'nwe'; expected 'auto'"),
    ("values", {"frozen": ["vale"]}, r"frozen is \['vale'\]; expected roles"),
    ("values", {"adapters": "lora"}, "adapters is 'lora'; expected a mapping"),
    ("values", {"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; expected at least 1"),
    ("values", {"max_steps": 0}, "max_steps is 0; .* or -1 for num_train_epochs"),
    ("values", {"num_train_epochs": 0}, "num_train_epochs is 0.0; expected more"),
    ("values", {"eval_steps": 5}, "eval_steps is 5.0, which needs eval_text"),
    ("values", {"config_name": "c"}, "model_name_or_path is 'm', config_name 'c'"),
    ("values", {**BEGUN, "tokenizer_name": None}, "config_name 'c' and tokenizer_name None"),
    ("values", {"adapters": {}, "trainable": "all"}, "Leave adapters out, or"),
    ("values", {"adapters": {}, "frozen": ["value"]}, r"adapters is set and frozen is \['value'\]"),
    ("values", {"tree": "x"}, "tree is 'x', and path_column is not given"),
    ("values", {"save_strategy": "epoch", "load_best_model_at_end": True}, "Trainer refuses.*load_best_model_at_end"),
    ("values", {"lr_scheduler_type": "linaer"}, "linaer is not a valid SchedulerType"),
    ("values", {"optim": "galore_adamw"}, "optim is 'galore_adamw', an optimizer that chooses"),
    ("values", {"optim_target_modules": ["q"]}, r"optim_target_modules is \['q'\], an optimizer"),
    ("values", {"generic_share": 1.5}, "generic_share is 1.5; expected a share"),
    ("run", {"base_kl": math.inf}, "base_kl is inf; expected a finite"),
    # Runs up to their first step.
    ("run", {"without": "bitsandbytes", "optim": "paged_adamw_8bit"}, "Trainer cannot be made: .*bitsandbytes"),
    ("run", {"without": "wandb", "report_to": "wandb"}, "report_to is wandb.*install it, or set report_to"),
    ("run", {"use_liger_kernel": True}, "use_liger_kernel is true.*a model without memory"),
    ("run", {"model": "bare"}, "trainable is 'auto', .* is a base.*Upscale it first"),
    ("run", {"model": "hier-ffn"}, "path of a text, and path_column is not given"),
    ("run", ROWS, "few rows of a large table. Leave it"),
    pytest.param("run", {"attn_implementation": "flash_attention_2"}, "Hub id .*FlashAttention2", marks=FLASH),
    ("run", {**KL, "trainable": "all"}, "base_kl is 0.3, and base parameter model.embed_tokens.weight trains"),
    ("run", {**KL, "adapters": {"r": 4, "bias": "all"}}, "adapters.bias trains biases"),
    ("run", {**KL, "use_liger_kernel": True}, "use_liger_kernel is true, .* no logits"),
    ("blocks", {**KL, "adapters": {"r": 4}}, "blocks of a bank train with the adapters"),
    ("run", {**STREAM, "max_steps": -1}, "max_steps is -1; expected the number"),
    ("run", {**STREAM, "dataloader_num_workers": 2}, "dataloader_num_workers is 2; expected 0"),
    ("run", {**STREAM, "train_sampling_strategy": "sequential"}, "is 'sequential'; .* shuffle_buffer: 0"),
    ("run", {**STREAM, "accelerator_config": {"split_batches": True}}, "accelerator_config is .*; expected neither"),
    ("run", {**STREAM, "corpus_split": "train[:10%]"}, "a stream has no slices; expected whole splits"),
    ("run", {**STREAM, "corpus": "short.jsonl", "sequence_length": 128}, "corpus has 4 tokens; .* sequence of 128"),
    ("run", {"eval_text": {"a": "short.jsonl"}, "eval_steps": 1}, "eval_text a has 4 tokens; expected"),
    ("run", {"eval_text": "blank.txt", "eval_steps": 1}, "eval_text 'blank.txt' is empty"),
    ("run", {"output": "full"}, r"holds thesis\.txt; choose another folder"),
    ("run", {"output": "full", "resume_from_checkpoint": "auto"}, r"holds thesis\.txt; choose another folder"),
    ("run", {"output": "file"}, "'.*file', a file; expected a folder"),
    ("run", {"output": "file/out"}, "'.*file' is no folder to write in"),
    ("run", {"output": "texts", "corpus": "texts/000.txt"}, "holds the corpus '.*000.txt'; choose"),
    ("run", {"output": "texts/out", "corpus": "texts"}, "lies in the corpus '.*texts'; choose"),
    ("run", {"output": "deep/out", "corpus": "short.jsonl", "sequence_length": 128}, "sequence of 128 tokens"),
    ("new model", {"config_name": "absent.json"}, r"config_name is 'absent\.json'; expected the file"),
    ("new model", {"tokenizer_name": "./absent"}, r"tokenizer_name is '\./absent'; expected the folder"),
    ("new model", {"attn_implementation": "none_such"}, "attn_implementation=.none_such.` is not supported"),
    ("new model", {"sequence_length": 999}, "sequence_length is 999, .* for 128 tokens"),
    ("new model", {"model_config": IMAGES}, r"config_name is '.*shape\.json'; expected"),
    ("new model", {"model_config": IMAGES, "attn_implementation": "eager"}, r"config_name is '.*shape\.json'; expected"),
    ("new model", {"model_config": PACKS}, "has packs, .* no glossary; expected a config"),
    ("new model", {"output_dir": "tokenizer/out"}, "lies in the tokenizer_name"),
    ("spoilt", {"spoil": lambda model: (model / "config.json").unlink()}, NO_MODEL),
    ("spoilt", {"spoil": lambda model: (model / "config.json").write_text("{")}, NO_MODEL),
    ("spoilt", {"spoil": lambda model: (model / "model.safetensors").unlink()}, NO_MODEL),
    ("spoilt", {"spoil": lambda model: (model / "model.safetensors").write_bytes(b"torn")}, NO_MODEL),
    ("spoilt", {"spoil": lambda model: [path.unlink() for path in model.glob("tokenizer*")]}, "no tokenizer that loads"),
    ("spoilt", {"spoil": without_values}, r"^model is '.*model', whose .* lacks 1 of .*layers\.1\.memory\.value_bank"),
    *(("spoilt", as_pointer(name), f"^{name} {IS_POINTER}") for name in ("config.json", "model.safetensors", "tokenizer.json")),
    # What trains.
    *(("trainable", {"kind": "native", "upscale": record, "trainable": "auto"}, "this llama model is a base, not")
      for record in (None, {"trainable": ["new"]})),
    *(("trainable", {"kind": "native", "trainable": layers}, r"is \[.*\]; expected layers .* \(0 <= layer < 6\)")
      for layers in ([], [3, 1, 3], [-1, 2])),
    *(("trainable", {"upscale": record, "trainable": "new"}, "or set trainable: all") for record in (None, {"new_layers": []})),
    ("trainable", {"upscale": {"new_layers": [1, 6]}, "trainable": "new"}, r"names \[6\], which the model does not have"),
    *(("trainable", {"trainable": value}, "expected 'auto', 'new', 'all', a list of layer") for value in ("none", None, [True])),
    ("trainable", {"trainable": ["router"]}, r"is \['router'\], but the new memories"),
    ("trainable", {"trainable": "new", "frozen": ["router"]}, r"frozen is \['router'\], .* no memory tensors"),
    ("trainable", {"trainable": [0], "frozen": ["value"]}, "role 'value' that would train; leave"),
    ("trainable", {"trainable": ["value"], "frozen": ["value"]}, "leaves nothing to train; freeze less"),
    ("packs", {}, "packs add texts, no parameters; .* adapters: {r: 16}"),
    ("groups", {}, "no parameter requires a gradient; call set_trainable"),
    # What a trainer can do with its arguments, and with what it is given.
    ("trainer", ("hier-ffn", {"fp16": True}, {}), "FSDP, DeepSpeed and fp16 do not support"),
    ("trainer", ("hier-ffn", {"optim": "adafactor"}, {}), "Adafactor does not have; .* optim: adamw_torch"),
    ("trainer", ("hier-ffn", {}, OF_A_CLASS), "SGD does not have; expected an optimizer"),
    ("trainer", ("hier-ffn", {}, MADE), "another optimizer does not have; expected"),
    ("trainer", ("ultramem-v2", {**ROWS, "optim": "adamw_torch_8bit"}, {}), "optim is 'adamw_torch_8bit'; expected"),
    ("trainer", ("ultramem-v2", ROWS, OF_A_CLASS), "was given an optimizer, which would be replaced"),
    ("trainer", ("ultramem-v2", ROWS, MADE), "was given an optimizer, which would be replaced"),
    ("trainer", ("moc", {"label_smoothing_factor": 0.1}, {}), "label_smoothing_factor is set"),
    ("trainer", ("moc", {}, {"compute_loss_func": print}), "compute_loss_func is set"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "keys", "message"), REQUESTS)
def test_wrong_requests_are_refused_before_writing(call, keys, message, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(message) as refusal:
        CALLS[call](request.getfixturevalue, keys)
    assert call in ("flags", "values") or "\n" not in str(refusal.value)
    assert not list(tmp_path.rglob("out"))
    assert {path.name for path in tmp_path.glob("full/*")} <= {"thesis.txt"}


MODEL, CORPUS, CHATS = "--model_name_or_path=model", "--corpus=texts.jsonl", "--dataset_name=texts.jsonl"
COMMANDS = [
    (main, ["recipe.yaml", "max_steps=1", MODEL, CORPUS], "'max_steps=1' is not a value of a key; expected TEXTS"),
    (main, ["--model", "model", "--output", "o", "notes"], "'notes' is not a value.*midus train notes --model model --out"),
    (main, ["misspelt.yaml", MODEL, CORPUS], "'max_step' is not a key; did you mean max_steps"),
    (main, ["odd.yaml", MODEL, CORPUS], "'1' is not a key. 'lr' is not a key. Expected"),
    (main, ["recipe.yaml", MODEL], "no 'corpus'; .* or by --corpus"),
    (main, ["texts.jsonl", "--model", "./no", "--output", "o"], "model_name_or_path is './no', which does not exist"),
    (main, ["recipe.yaml", MODEL, CORPUS, "--output_dir=full"], "output_dir is 'full', which holds notes.txt; choose"),
    (main, ["recipe.yaml", CORPUS, "--model=absent/model"], "'absent/model', which is no folder here"),
    (main, ["notes"], "--output is missing; run 'midus train TEXTS"),
    (main, ["notes", "--output", "o"], "no 'model_name_or_path'; .* or by --model"),
    (main, ["./model"], "'./model' is a model; expected texts"),
    (main, ["notes", "--corpus", "other"], "corpus is given twice, .* Leave"),
    (main, ["absent.yaml"], "config is 'absent.yaml', which cannot be read"),
    (main, ["notes", "--model=base", "--output=o", "--sequence_length=8"], "trainable is 'auto', .* is a base"),
    (sft, ["chats.jsonl", "--model=base", "--output=o", "--max_length=8"], "trainable is 'auto', .* is a base"),
    (sft, ["chats.yaml", "max_steps=1", MODEL, CHATS], "'max_steps=1' is not a value of a key; expected CHATS"),
    (sft, ["chats.jsonl"], "--output is missing; run 'midus sft CHATS"),
    (sft, ["./model"], "'./model' is a model; expected chats. Run 'midus sft CHATS"),
    (sft, ["chats.yaml", MODEL, CHATS, "--max_lenght=1"], "'--max_lenght' is not a key; did you mean --max_length"),
    (sft, ["chats.yaml", MODEL, CHATS], "dataset_name is 'texts.jsonl', whose rows have text; expected the columns"),
    (sft, ["chats.yaml", MODEL, "--dataset_name=nothing.jsonl"], "dataset_name is 'nothing.jsonl', which is empty: it has no row"),
    (sft, ["chats.yaml", MODEL], "no 'dataset_name'; .* or by --dataset_name"),
]  # fmt: skip
FILES = {
    "notes/a.txt": "a",
    "chats.jsonl": '{"prompt": "a", "completion": "b"}',
    "full/notes.txt": "",
    "recipe.yaml": "{max_steps: 2, sequence_length: 8, bf16: false}",
    "chats.yaml": "{max_steps: 2, max_length: 8, bf16: false}",
    "misspelt.yaml": "max_step: 2\n",
    "nothing.jsonl": "",
    "odd.yaml": "{1: 2, lr: 3}",
    "texts.jsonl": '{"text": "a"}',
}


@pytest.fixture(scope="module")
def room(upscaled, tmp_path_factory):
    room = tmp_path_factory.mktemp("room")
    for name, source in (("model", upscaled()), ("base", upscaled().parent / "base")):
        shutil.copytree(source, room / name)
    for name, content in FILES.items():
        (room / name).parent.mkdir(exist_ok=True)
        (room / name).write_text(content)
    return room


@pytest.mark.parametrize(("command", "words", "message"), COMMANDS)
def test_wrong_run_is_refused_in_one_line(command, words, message, room, monkeypatch, capsys):
    monkeypatch.chdir(room)
    before = sorted(room.rglob("*"))
    assert command(words) == 2
    out, err = capsys.readouterr()
    with refused(f"^midus {'train' if command is main else 'sft'}: .*{message}"):
        raise ValueError(err.splitlines()[-1])
    assert out == ""
    assert sorted(room.rglob("*")) == before


def test_unreachable_hub_is_refused_in_one_line(words, tmp_path, capsys):
    assert main([*words, "--push_to_hub=true", "--hub_model_id=me/model"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^midus train: push_to_hub is true, .*offline.*upload the folder later", line)
    assert not (tmp_path / "out").exists()


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
        assert "<hidden>" in shown
        assert "opensesame" not in shown
        assert "Planted" not in shown
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
    assert value == expected
    assert type(value) is type(expected)


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
    assert type(read.max_steps) is int
    assert type(of_recipe.learning_rate) is float


@pytest.mark.parametrize("kind", [TrainArguments, SftArguments])
def test_numbers_within_mappings_are_numbers(kind, recipe):
    text, values = recipe.read_text().replace("corpus", kind.data_key), "{min_lr: 1e-6, num_cycles: 010}"
    for line, flags in ((f"lr_scheduler_kwargs: {values}", []), ("", ["--lr_scheduler_kwargs", values])):
        recipe.write_text(f"{text}\n{line}\n")
        read = read_arguments(kind, [str(recipe), *flags])
        assert read.lr_scheduler_kwargs == {"min_lr": 1e-6, "num_cycles": 10}


@pytest.mark.parametrize(("main", "kind", "texts", "recomputes"), [
    (sft, SftKeys, "CHATS", "true"), (main, TrainKeys, "TEXTS", "false"),
])  # fmt: skip
def test_help_describes_our_keys_once(main, kind, texts, recomputes, capsys):
    assert main(["texts", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: midus {kind.command} {texts}|RECIPE [--KEY VALUE ...]\n")
    entries = dict(re.findall(r"^  --(\w+) (.*(?:\n {10}.*)*)", shown, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(kind)}
    assert entries.keys() - {"no_assistant_only_loss"} == {*fields, "model", "output"}
    assert all(entries[name].count("Default:") == 1 for name in fields)
    assert "(default:" not in shown
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
    assert "Default: 1e-4. Without a recipe: null. --" in shown
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
