"""What becomes of each key of TRL's: it works as TRL has it, or is refused by name."""

import dataclasses
import re

import pytest
from training.tiny_run import refused
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from trl import SFTConfig

from midus_hf.training.sft.arguments import REFUSED, SftArguments
from midus_hf.training.sft.run import SftRun, finetune

NEEDED = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "bf16": False}

# Keys that TRL reads of the arguments of a run, or that a run reads in its place.
WORKING = {
    *(
        "activation_offloading",
        "assistant_only_loss",
        "chat_template_path",
        "completion_only_loss",
        "dataset_num_proc",
    ),
    *("eos_token", "max_length", "packing", "packing_strategy", "pad_to_multiple_of", "pad_token"),
    *("router_aux_loss_coef", "shuffle_dataset", "truncation_mode"),
}


def test_each_key_that_trl_adds_works_or_is_refused():
    added = {field.name for field in dataclasses.fields(SFTConfig)} - {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    assert added == WORKING | REFUSED.keys()
    assert not WORKING & REFUSED.keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_type": "dft"}, "loss_type is 'dft'; expected 'nll': the loss is the model's own, with the terms of its memories."),
        ({"model_init_kwargs": {"a": 1}}, "model_init_kwargs is {'a': 1}; expected None: a run loads its model itself"),
        ({"trust_remote_code": True}, "trust_remote_code is True; expected False: a run executes no code"),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs is {'skip_prepare_dataset': True}; expected None"),
        ({"dataset_text_field": "body"}, "dataset_text_field is 'body'; expected 'text': rows are chats"),
        ({"eval_packing": False}, "eval_packing is False; expected None: held-out texts are always packed sequences. Leave it out."),
        ({"padding_free": True}, "padding_free is True; expected False: packing: true leaves padding out, and keeps max_length."),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_without_effect_is_refused_by_name(keys, message):
    with refused(re.escape(message)):
        SftArguments(**NEEDED, **keys)


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
def test_special_tokens_that_are_named_are_those_of_the_saved_model(config_for, tmp_path):
    finetune(config_for("out", eos_token="<|im_end|>", pad_token="<|im_start|>", pad_to_multiple_of=16, max_steps=1))
    tokenizer, config = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, AutoConfig))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>")
    assert [config.eos_token_id, config.pad_token_id] == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|im_start|>"]
    )


def test_batches_are_padded_as_far_as_is_said(config_for):
    run = SftRun(config_for("out", pad_to_multiple_of=32, bf16=False))
    batch = next(iter(run.trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[1] % 32 == 0
