"""`midus sft` from the outside: what it prints, what it writes, how it exits."""

import dataclasses
import shutil

import pytest
import yaml
from sft.tiny_chats import prepared
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig

from midus_hf.cli import sft as command
from midus_hf.cli.sft import main
from midus_hf.config.errors import install_extra
from midus_hf.training.sft import REFUSED, SftArguments
from midus_hf.training.sft_rows import CHATML


@pytest.fixture
def words(base, chats, tmp_path) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 3\nlearning_rate: 1e-2\nchat_template_path: chatml\nbf16: false\nlogging_steps: 1\n")
    given = {"model_name_or_path": base("llama", True), "dataset_name": chats, "output_dir": tmp_path / "out"}
    given |= {"max_length": 96, "per_device_train_batch_size": 2}
    return [str(recipe), *(f"--{key}={value}" for key, value in given.items())]


def test_packages_that_are_not_installed_are_named(words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_NEEDED", ("datasets", "no_such_package"))
    assert main(words) == 2
    assert f"midus sft needs no_such_package, not installed; {install_extra('train')}." in capsys.readouterr().err
    assert main(["--help"]) == 0, "which needs none"


NEEDED = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "bf16": False}

# Keys that TRL reads of the arguments of a run, or that a run reads in its place.
WORKING = set(
    "activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_num_proc eos_token max_length packing "
    "packing_strategy pad_to_multiple_of pad_token router_aux_loss_coef shuffle_dataset truncation_mode".split()
)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_each_key_that_trl_adds_works_or_is_refused():
    of_trl, of_trainer = (
        {field.name for field in dataclasses.fields(kind)} for kind in (SFTConfig, TrainingArguments)
    )
    assert of_trl - of_trainer == WORKING | REFUSED.keys()
    assert not WORKING & REFUSED.keys()
    assert SftArguments(**NEEDED).activation_checkpointing, "which is the default of TRL"
    assert not SftArguments(**NEEDED, activation_checkpointing=False).gradient_checkpointing
    assert SftArguments(**NEEDED, include_num_input_tokens_seen="no").include_num_input_tokens_seen == "no"


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
def test_named_special_tokens_are_saved(config_for, tmp_path):
    run = prepared(config_for(eos_token="<|im_end|>", pad_token="<|im_start|>", pad_to_multiple_of=32, max_steps=1))
    assert next(iter(run.trainer.get_train_dataloader()))["input_ids"].shape[1] % 32 == 0
    run.execute()
    tokenizer, config = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, AutoConfig))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>")
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert [config.eos_token_id, config.pad_token_id] == ids


def test_recipe_with_trl_keys_trains_to_the_default_folder(base, chats, tmp_path, monkeypatch):
    model = shutil.copytree(base("llama", True), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    keys = {"model_name_or_path": str(model), "attn_implementation": "sdpa", "dataset_name": str(chats)}
    keys |= {"dataset_train_split": "train", "max_steps": 2, "max_length": 96, "packing": False, "report_to": "none"}
    keys |= {"assistant_only_loss": True, "lr_scheduler_type": "cosine", "optim": "adamw_torch", "bf16": False}
    (tmp_path / "sft_config.yaml").write_text(yaml.safe_dump(keys))
    of_trl = map(dataclasses.fields, (ScriptArguments, SFTConfig, ModelConfig))
    assert keys.keys() <= {field.name for fields in of_trl for field in fields}
    monkeypatch.chdir(tmp_path)
    assert main(["sft_config.yaml"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "trainer_output")
