"""What a run may be told, and is refused: the value and what to do, before a model is loaded where that is possible."""

import copy
import dataclasses
import math
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refusal, Spoilt, each, remove, replace
from safetensors.torch import load_file, save_file
from training.tiny_run import PreparedRun, refused, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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


def write_recipe(folder: Path, line: str = "") -> Path:
    path = folder / "train.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in NEEDED.items()) + line + "\n")
    return path


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path)


FLAGS = [
    Refusal(["--max_steps", "1:30"], "max_steps is '1:30'; expected a whole"),
    Refusal(["--max_steps"], "--max-steps: expected one argument"),
    Refusal(["--value_schedule", "4x"], "--value-schedule: invalid choice: '4x'"),
    Refusal(["--adapters", "{r: 1, r: 2}"], "--adapters has 'r' twice"),
    Refusal(["--adapters", "{r: 8}", "--trainable", "new"], "adapters is set and trainable is 'new'"),
    Refusal(["--seed", "null"], "seed is None; expected a whole"),
    Refusal(["--trainable", "null"], "trainable is None; expected 'auto'"),
    Refusal(["--max_step=1", "--output-dri", "o"], "mean --max_steps.*mean --output_dir.*Expected --KEY VALUE"),
]


@each(FLAGS)
def test_wrong_flag_is_refused(row, recipe):
    with refused(row.said):
        read_arguments(TrainArguments, [str(recipe), *row.asked])


LINES = [
    Refusal("save_strategy: no", "save_strategy is False; expected a string.*Put text that YAML reads"),
    Refusal("logging_strategy: no", "logging_strategy is False; expected one of: no"),
]


@each(LINES)
def test_wrong_line_of_a_recipe_is_refused(row, tmp_path):
    recipe = write_recipe(tmp_path, row.asked)
    with refused(row.said):
        read_arguments(TrainArguments, [str(recipe)])


BEGUN = {"model_name_or_path": None, "config_name": "c", "tokenizer_name": "t"}
VALUES = [
    Refusal({"warmup_ratio": 0.1}, "no option 'warmup_ratio'.*one of: output_dir"),
    Refusal({"trainable": "nwe"}, "trainable is 'nwe'; expected 'auto'"),
    Refusal({"frozen": ["vale"]}, r"frozen is \['vale'\]; expected roles"),
    Refusal({"adapters": "lora"}, "adapters is 'lora'; expected a mapping"),
    Refusal({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; expected at least 1"),
    Refusal({"max_steps": 0}, "max_steps is 0; .* or -1 for num_train_epochs"),
    Refusal({"num_train_epochs": 0}, "num_train_epochs is 0.0; expected more"),
    Refusal({"eval_steps": 5}, "eval_steps is 5.0, which needs eval_text"),
    Refusal({"config_name": "c"}, "model_name_or_path is 'm', config_name 'c'"),
    Refusal({**BEGUN, "tokenizer_name": None}, "config_name 'c' and tokenizer_name None"),
    Refusal({"adapters": {}, "trainable": "all"}, "Leave adapters out, or"),
    Refusal({"adapters": {}, "frozen": ["value"]}, r"adapters is set and frozen is \['value'\]"),
    Refusal({"tree": "x"}, "tree is 'x', and path_column is not given"),
    Refusal({"save_strategy": "epoch", "load_best_model_at_end": True}, "Trainer refuses.*load_best_model_at_end"),
    Refusal({"lr_scheduler_type": "linaer"}, "linaer is not a valid SchedulerType"),
    Refusal({"optim": "galore_adamw"}, "optim is 'galore_adamw', an optimizer that chooses"),
    Refusal({"optim_target_modules": ["q"]}, r"optim_target_modules is \['q'\], an optimizer"),
    Refusal({"generic_share": 1.5}, "generic_share is 1.5; expected a share"),
]


@each(VALUES)
def test_wrong_value_of_a_key_is_refused(row):
    with refused(row.said):
        from_mapping(TrainArguments, {**NEEDED, **row.asked})


@pytest.fixture
def refuses(tmp_path, monkeypatch):
    """Check that a call is refused with a message of one line, and writes nothing."""
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def check(message: str) -> Iterator[None]:
        with refused(message) as refusal:
            yield
        assert "\n" not in str(refusal.value)
        assert not list(tmp_path.rglob("out"))
        assert {path.name for path in tmp_path.glob("full/*")} <= {"thesis.txt"}

    return check


@pytest.fixture
def texts(tmp_path) -> None:
    for name in ("file", "texts/000.txt", "full/thesis.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("w3 w4 " * 20)
    (tmp_path / "blank.txt").write_text(" ")
    (tmp_path / "short.jsonl").write_text('{"text": "w4 w5 w6"}')


@dataclass(frozen=True)
class RefusedRun(Refusal):
    method: str = "midus-hml"
    missing: str | None = None  # a package


ROWS = {"sparse_values": True}
KL = {"base_kl": 0.3}
STREAM = {"streaming": True, "shuffle_buffer": 5}
FLASH = pytest.mark.skipif(any(map(find_spec, ("flash_attn", "kernels"))), reason="it may be had here")
RUNS = [
    RefusedRun({"base_kl": math.inf}, "base_kl is inf; expected a finite"),
    RefusedRun({"optim": "paged_adamw_8bit"}, "Trainer cannot be made: .*bitsandbytes", missing="bitsandbytes"),
    RefusedRun({"report_to": "wandb"}, "report_to is wandb.*install it, or set report_to", missing="wandb"),
    RefusedRun({"use_liger_kernel": True}, "use_liger_kernel is true.*a model without memory"),
    RefusedRun({"path_column": None}, "path of a text, and path_column is not given", method="hier-ffn"),
    RefusedRun(ROWS, "few rows of a large table. Leave it"),
    pytest.param(RefusedRun({"attn_implementation": "flash_attention_2"}, "Hub id .*FlashAttention2"), marks=FLASH),
    RefusedRun({**KL, "trainable": "all"}, "base_kl is 0.3, and base parameter model.embed_tokens.weight trains"),
    RefusedRun({**KL, "adapters": {"r": 4, "bias": "all"}}, "adapters.bias trains biases"),
    RefusedRun({**KL, "use_liger_kernel": True}, "use_liger_kernel is true, .* no logits"),
    RefusedRun({**STREAM, "max_steps": -1}, "max_steps is -1; expected the number"),
    RefusedRun({**STREAM, "dataloader_num_workers": 2}, "dataloader_num_workers is 2; expected 0"),
    RefusedRun({**STREAM, "train_sampling_strategy": "sequential"}, "is 'sequential'; .* shuffle_buffer: 0"),
    RefusedRun({**STREAM, "accelerator_config": {"split_batches": True}}, "accelerator_config is .*; expected neither"),
    RefusedRun({**STREAM, "corpus_split": "train[:10%]"}, "a stream has no slices; expected whole splits"),
    RefusedRun({**STREAM, "corpus": "short.jsonl", "sequence_length": 128}, "corpus has 4 tokens; .* sequence of 128"),
    RefusedRun({"eval_text": {"a": "short.jsonl"}, "eval_steps": 1}, "eval_text a has 4 tokens; expected"),
    RefusedRun({"eval_text": "blank.txt", "eval_steps": 1}, "eval_text 'blank.txt' is empty"),
    RefusedRun({"output": "full"}, r"holds thesis\.txt; choose another folder"),
    RefusedRun({"output": "full", "resume_from_checkpoint": "auto"}, r"holds thesis\.txt; choose another folder"),
    RefusedRun({"output": "file"}, "'.*file', a file; expected a folder"),
    RefusedRun({"output": "file/out"}, "'.*file' is no folder to write in"),
    RefusedRun({"output": "texts", "corpus": "texts/000.txt"}, "holds the corpus '.*000.txt'; choose"),
    RefusedRun({"output": "texts/out", "corpus": "texts"}, "lies in the corpus '.*texts'; choose"),
    RefusedRun({"output": "deep/out", "corpus": "short.jsonl", "sequence_length": 128}, "sequence of 128 tokens"),
]  # fmt: skip


@each(RUNS)
def test_wrong_run_is_refused_before_writing(row, refuses, texts, config_for, upscaled, without):
    if row.missing:
        without(row.missing)
    model = upscaled("llama", row.method)
    with refuses(row.said):
        PreparedRun(config_for(model=model, **row.asked))


def test_run_of_a_base_is_refused_before_its_weights_are_read(refuses, config_for, upscaled, tmp_path):
    base = shutil.copytree(upscaled().parent / "base", tmp_path / "bare")
    (base / "model.safetensors").unlink()
    with refuses("trainable is 'auto', .* is a base.*Upscale it first"):
        PreparedRun(config_for(model=base))


def test_blocks_do_not_train_with_adapters_towards_the_base(refuses, blocks_for):
    with refuses("blocks of a bank train with the adapters"):
        PreparedRun(blocks_for(**KL, adapters={"r": 4}))


PACKED = {"model_type": "midus_llama", "num_hidden_layers": 2, "memory": [{"type": "packs", "layers": [0]}]}
CONFIGS = {
    "images": AutoConfig.for_model("vit", vocab_size=128, max_position_embeddings=128),
    "packs": AutoConfig.for_model(**PACKED),
}
NEW_MODELS = [
    Refusal({"config_name": "absent.json"}, r"config_name is 'absent\.json'; expected the file"),
    Refusal({"tokenizer_name": "./absent"}, r"tokenizer_name is '\./absent'; expected the folder"),
    Refusal({"attn_implementation": "none_such"}, "attn_implementation=.none_such.` is not supported"),
    Refusal({"sequence_length": 999}, "sequence_length is 999, .* for 128 tokens"),
    Refusal({"model_config": "images"}, r"config_name is '.*shape\.json'; expected"),
    Refusal({"model_config": "images", "attn_implementation": "eager"}, r"config_name is '.*shape\.json'; expected"),
    Refusal({"model_config": "packs"}, "has packs, .* no glossary; expected a config"),
    Refusal({"output_dir": "tokenizer/out"}, "lies in the tokenizer_name"),
]


@each(NEW_MODELS)
def test_wrong_run_of_a_new_model_is_refused_before_writing(row, refuses, begun):
    keys = {**row.asked, "model_config": CONFIGS.get(row.asked.get("model_config"))}
    with refuses(row.said):
        PreparedRun(begun(**keys))


def remove_values(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.memory.value_bank"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def remove_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


NO_MODEL = "^model_name_or_path is '.*model'.*expected the folder or Hub id of a language model: "
IS_POINTER = "of .*model is a Git LFS pointer.*Run git lfs pull"
POINTER = "version https://git-lfs.github.com/spec/v1\n"
SPOILT = [
    Spoilt("no config.json", NO_MODEL, remove("config.json")),
    Spoilt("half a config.json", NO_MODEL, replace("config.json", "{")),
    Spoilt("no weights", NO_MODEL, remove("model.safetensors")),
    Spoilt("torn weights", NO_MODEL, replace("model.safetensors", "torn")),
    Spoilt("no tokenizer", "no tokenizer that loads", remove_tokenizer),
    Spoilt("no values", r"^model is '.*model', whose .* lacks 1 of .*layers\.1\.memory\.value_bank", remove_values),
    Spoilt("pointer to a config", f"^config.json {IS_POINTER}", replace("config.json", POINTER)),
    Spoilt("pointer to weights", f"^model.safetensors {IS_POINTER}", replace("model.safetensors", POINTER)),
    Spoilt("pointer to a tokenizer", f"^tokenizer.json {IS_POINTER}", replace("tokenizer.json", POINTER)),
]


@each(SPOILT)
def test_run_of_a_spoilt_model_is_refused_before_writing(row, refuses, config_for, upscaled, tmp_path):
    model = shutil.copytree(upscaled(), tmp_path / "model")
    row.spoil(model)
    with refuses(row.said):
        PreparedRun(config_for(model=model))


LAYERS = r"is \[.*\]; expected layers .* \(0 <= layer < 6\)"
OF_A_BASE = [
    Refusal({"upscale": None, "trainable": "auto"}, "this llama model is a base, not"),
    Refusal({"upscale": {"trainable": ["new"]}, "trainable": "auto"}, "this llama model is a base, not"),
    Refusal({"trainable": []}, LAYERS),
    Refusal({"trainable": [3, 1, 3]}, LAYERS),
    Refusal({"trainable": [-1, 2]}, LAYERS),
]
NO_CHOICE = "expected 'auto', 'new', 'all', a list of layer"
OF_A_MEMORY = [
    Refusal({"upscale": None, "trainable": "new"}, "or set trainable: all"),
    Refusal({"upscale": {"new_layers": []}, "trainable": "new"}, "or set trainable: all"),
    Refusal({"upscale": {"new_layers": [1, 6]}, "trainable": "new"}, r"names \[6\], which the model does not have"),
    Refusal({"trainable": "none"}, NO_CHOICE),
    Refusal({"trainable": None}, NO_CHOICE),
    Refusal({"trainable": [True]}, NO_CHOICE),
    Refusal({"trainable": ["router"]}, r"is \['router'\], but the new memories"),
    Refusal({"trainable": "new", "frozen": ["router"]}, r"frozen is \['router'\], .* no memory tensors"),
    Refusal({"trainable": [0], "frozen": ["value"]}, "role 'value' that would train; leave"),
    Refusal({"trainable": ["value"], "frozen": ["value"]}, "leaves nothing to train; freeze less"),
]


def choose_trained(model: PreTrainedModel, asked: dict[str, Any]) -> None:
    chosen = dict(asked)
    model.config.upscale = chosen.pop("upscale", model.config.upscale)
    set_trainable(model, **chosen)


@each(OF_A_BASE)
def test_wrong_choice_of_layers_leaves_all_trainable(row, refuses, native):
    model = AutoModelForCausalLM.from_pretrained(native("llama"))
    with refuses(row.said):
        choose_trained(model, row.asked)
    assert all(parameter.requires_grad for parameter in model.parameters())


@each(OF_A_MEMORY)
def test_wrong_choice_of_what_trains_is_refused(row, refuses, upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with refuses(row.said):
        choose_trained(model, row.asked)


def test_packs_have_nothing_that_trains(refuses):
    config = AutoConfig.for_model(**PACKED, upscale={"trainable": "new", "new_layers": [], "new_memories": ["packs"]})
    with refuses("packs add texts, no parameters; .* adapters: {r: 16}"):
        resolve_trainable(config, "auto")


def test_optimizer_without_a_trained_parameter_is_refused(refuses):
    with refuses("no parameter requires a gradient; call set_trainable"):
        parameter_groups(torch.nn.Linear(2, 2).requires_grad_(False), Rates())


@dataclass(frozen=True)
class RefusedTrainer(Refusal):
    """`asked`: keys. `given` goes to the trainer itself."""

    method: str
    given: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.method, super().__str__(), *self.given)))


OF_A_CLASS = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}
MADE = {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}
TRAINERS = [
    RefusedTrainer({"fp16": True}, "FSDP, DeepSpeed and fp16 do not support", "hier-ffn"),
    RefusedTrainer({"optim": "adafactor"}, "Adafactor does not have; .* optim: adamw_torch", "hier-ffn"),
    RefusedTrainer({}, "SGD does not have; expected an optimizer", "hier-ffn", OF_A_CLASS),
    RefusedTrainer({}, "another optimizer does not have; expected", "hier-ffn", MADE),
    RefusedTrainer({**ROWS, "optim": "adamw_torch_8bit"}, "optim is 'adamw_torch_8bit'; expected", "ultramem-v2"),
    RefusedTrainer(ROWS, "was given an optimizer, which would be replaced", "ultramem-v2", OF_A_CLASS),
    RefusedTrainer(ROWS, "was given an optimizer, which would be replaced", "ultramem-v2", MADE),
    RefusedTrainer({"label_smoothing_factor": 0.1}, "label_smoothing_factor is set", "moc"),
    RefusedTrainer({}, "compute_loss_func is set", "moc", {"compute_loss_func": print}),
]


@each(TRAINERS)
def test_trainer_refuses_what_its_model_cannot_do(row, refuses, upscaled, corpus, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama", row.method))
    set_trainable(model, "auto")
    options = tiny_config(None, corpus, tmp_path, config_name="c", tokenizer_name="t")
    vars(options).update(row.asked)
    with refuses(row.said):
        MemoryTrainer(model, options, **row.given)


MODEL, CORPUS, CHATS = "--model_name_or_path=model", "--corpus=texts.jsonl", "--dataset_name=texts.jsonl"
MAIN = {"train": main, "sft": sft}
COMMANDS = [
    Refusal(["train", "recipe.yaml", "max_steps=1", MODEL, CORPUS], "'max_steps=1' is not a value of a key; expected TEXTS"),
    Refusal(["train", "--model", "model", "--output", "o", "notes"], "'notes' is not a value.*midus train notes --model model --out"),
    Refusal(["train", "misspelt.yaml", MODEL, CORPUS], "'max_step' is not a key; did you mean max_steps"),
    Refusal(["train", "odd.yaml", MODEL, CORPUS], "'1' is not a key. 'lr' is not a key. Expected"),
    Refusal(["train", "recipe.yaml", MODEL], "no 'corpus'; .* or by --corpus"),
    Refusal(["train", "texts.jsonl", "--model", "./no", "--output", "o"], "model_name_or_path is './no', which does not exist"),
    Refusal(["train", "recipe.yaml", MODEL, CORPUS, "--output_dir=full"], "output_dir is 'full', which holds notes.txt; choose"),
    Refusal(["train", "recipe.yaml", CORPUS, "--model=absent/model"], "'absent/model', which is no folder here"),
    Refusal(["train", "notes"], "--output is missing; run 'midus train TEXTS"),
    Refusal(["train", "notes", "--output", "o"], "no 'model_name_or_path'; .* or by --model"),
    Refusal(["train", "./model"], "'./model' is a model; expected texts"),
    Refusal(["train", "notes", "--corpus", "other"], "corpus is given twice, .* Leave"),
    Refusal(["train", "absent.yaml"], "config is 'absent.yaml', which cannot be read"),
    Refusal(["train", "notes", "--model=base", "--output=o", "--sequence_length=8"], "trainable is 'auto', .* is a base"),
    Refusal(["sft", "chats.jsonl", "--model=base", "--output=o", "--max_length=8"], "trainable is 'auto', .* is a base"),
    Refusal(["sft", "chats.yaml", "max_steps=1", MODEL, CHATS], "'max_steps=1' is not a value of a key; expected CHATS"),
    Refusal(["sft", "chats.jsonl"], "--output is missing; run 'midus sft CHATS"),
    Refusal(["sft", "./model"], "'./model' is a model; expected chats. Run 'midus sft CHATS"),
    Refusal(["sft", "chats.yaml", MODEL, CHATS, "--max_lenght=1"], "'--max_lenght' is not a key; did you mean --max_length"),
    Refusal(["sft", "chats.yaml", MODEL, CHATS], "dataset_name is 'texts.jsonl', whose rows have text; expected the columns"),
    Refusal(
        ["sft", "chats.yaml", MODEL, "--dataset_name=nothing.jsonl"],
        "dataset_name is 'nothing.jsonl', which is empty: it has no row"),
    Refusal(["sft", "chats.yaml", MODEL], "no 'dataset_name'; .* or by --dataset_name"),
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


@each(COMMANDS)
def test_wrong_command_is_refused_in_one_line(row, room, monkeypatch, capsys):
    monkeypatch.chdir(room)
    before = sorted(room.rglob("*"))
    command, *words = row.asked
    assert MAIN[command](words) == 2
    out, err = capsys.readouterr()
    assert re.search(f"^midus {command}: .*{row.said}", err.splitlines()[-1])
    assert out == ""
    assert sorted(room.rglob("*")) == before


def test_unreachable_hub_is_refused_in_one_line(words, tmp_path, capsys):
    assert main([*words, "--push_to_hub=true", "--hub_model_id=me/model"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^midus train: push_to_hub is true, .*offline.*upload the folder later", line)
    assert not (tmp_path / "out").exists()


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
