"""Heads over upscaled models train, with PEFT too, and TRL trains upscaled models on preferences and rewards."""

import itertools

import pytest
import torch
from adapters.adapted_models import let_act
from datasets import Dataset
from pairs import by_default
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt
from training.tiny_run import refused, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from midus_hf.training.adapters import lora_config
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.trainer import MemoryTrainer, TrainsMemory

TASKS = {AutoModelForSequenceClassification: "SEQ_CLS", AutoModelForTokenClassification: "TOKEN_CLS"}
# Methods: an inserted memory, an attached one with routers, and copies of layers, whose classes are the family's own.
METHODS = ("midus-hml", "moc", "llama-pro")
QUIET = {
    **{"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1},
    **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
}


@pytest.fixture
def head(upscaled):
    """Load a head from a checkpoint that a method has upscaled."""

    def load(auto, method="llama-pro", **settings):
        torch.manual_seed(1)
        settings = {} if auto is AutoModelForCausalLM else {"num_labels": 2, "pad_token_id": 0, **settings}
        return auto.from_pretrained(upscaled("llama", method), **settings)

    return load


def logits_of(model):
    """Return the logits of a head for the prompt, as one tensor."""
    with torch.no_grad():
        return model.eval()(prompt()).logits


def is_new(name, config):
    """Return whether a tensor is new to the base: of a head with labels, a memory or an inserted layer."""
    new = ["score.", ".memor", *(f".layers.{layer}." for layer in config.upscale["new_layers"])]
    return any(part in name for part in new)


def test_a_bare_stack_stays_frozen(upscaled):
    stack = AutoModelForCausalLM.from_pretrained(upscaled("llama")).model
    set_trainable(stack)
    assert not stack.norm.weight.requires_grad


@pytest.mark.parametrize("auto", TASKS)
def test_adapters_and_the_head_are_saved_loaded_and_merged(auto, head, tmp_path):
    """Use `lora_config`, which trains new layers whole, and a plain config of PEFT, which knows the head by its name."""
    for number, make in enumerate(
        (lora_config, lambda model: LoraConfig(task_type=TASKS[auto], target_modules=["q_proj"]))
    ):
        config = make(head(auto))
        assert config.task_type == TASKS[auto]
        adapted = get_peft_model(head(auto), config)
        trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        assert any("score.modules_to_save.default.weight" in name for name in trained)
        let_act(adapted)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "score.modules_to_save" in name:
                    parameter.normal_()
        expected = logits_of(adapted)
        adapted.save_pretrained(tmp_path / str(number))
        assert torch.equal(logits_of(PeftModel.from_pretrained(head(auto), tmp_path / str(number))), expected)
        torch.testing.assert_close(logits_of(adapted.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)


def preferences():
    """Return pairs of answers, of which one is chosen."""
    rows = [{"prompt": f"w{5 + row} w9", "chosen": "w7 w8 w9", "rejected": f"w{row + 20} w3"} for row in range(8)]
    return Dataset.from_list(rows)


def rewards(completions, **_):
    """Of each text: its different words, and a word that it may have."""
    return [float(len(set(text.split()))) + text.count("w1") for text in completions]


# Trainers of TRL with their arguments, those that differ from `QUIET`, and what they are given beside texts.
TRAINERS = {
    RewardTrainer: (RewardConfig, {"max_length": 16}, {}),
    DPOTrainer: (DPOConfig, {"max_length": 16}, {}),
    GRPOTrainer: (
        GRPOConfig,
        {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4},
        {"reward_funcs": rewards},
    ),
}


@pytest.mark.parametrize(
    ("trainer_class", "method"),
    by_default(zip(TRAINERS, ("moc", "moc", "llama-pro"), strict=True), itertools.product(TRAINERS, METHODS)),
)
def test_trl_trains_on_rewards_and_preferences(trainer_class, method, head, tmp_path):
    model = head(AutoModelForCausalLM, method)
    if trainer_class is RewardTrainer:
        model = head(AutoModelForSequenceClassification, method, num_labels=1)
    set_trainable(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments_class, options, given = TRAINERS[trainer_class]

    class WithMemory(TrainsMemory, trainer_class):
        """TRL's trainer with the parameter groups of a memory model."""

    trainer = WithMemory(
        model,
        args=arguments_class(output_dir=str(tmp_path), **{**QUIET, **options}),
        train_dataset=preferences() if trainer_class is not GRPOTrainer else preferences().select_columns(["prompt"]),
        processing_class=tiny_tokenizer(),
        **given,
    )
    trainer.train()
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and moved <= trains == {name for name in before if is_new(name, model.config)}
    if trainer_class is RewardTrainer:
        assert "score.weight" in moved
        trainer.save_model(tmp_path / "saved")
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
        assert type(saved) is type(model) and torch.equal(logits_of(saved), logits_of(model))


def test_a_trainer_that_generates_its_texts_refuses_to_train_blocks(upscaled, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama", "hier-ffn"))
    set_trainable(model)
    trainer = MemoryTrainer(model, TrainingArguments(tmp_path, **QUIET), train_dataset=[])
    with refused(r"generates its texts, for which it fetches none; expected a trainer .* Or freeze the blocks"):
        trainer.training_step(model, [{"prompt": "w5"}])
