"""Heads over upscaled models train, with PEFT too, TRL trains them on preferences and rewards, and documented scripts run."""

import math
import shutil

import pytest
import torch
from adapters.adapted_models import let_act
from datasets import Dataset
from models.memory_models import fill
from peft import PeftModel, get_peft_model
from tiny import logits
from training.tiny_run import QUIET, document, is_new, refused, tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig
from trl.trainer.utils import hash_module

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.training.adapters import lora_config
from midus_hf.training.optim import set_trainable
from midus_hf.training.trainer import MemoryTrainer, MemoryTrainerMixin
from tests.docs.snippets import take


def head_of(auto, folder, **settings):
    torch.manual_seed(1)
    settings = {} if auto is AutoModelForCausalLM else {"num_labels": 2, "pad_token_id": 0, **settings}
    return auto.from_pretrained(folder, **settings)


def is_not_of_base(name, config):
    """Return whether a tensor is new to the base: of a head with labels, a memory or an inserted layer."""
    new = ["score.", ".memor", *(f".layers.{layer}." for layer in config.upscale["new_layers"])]
    return any(part in name for part in new)


def test_a_bare_stack_stays_frozen(upscaled):
    stack = AutoModelForCausalLM.from_pretrained(upscaled("llama")).model
    set_trainable(stack)
    assert not stack.norm.weight.requires_grad


@pytest.mark.parametrize(
    ("auto", "task"), [(AutoModelForSequenceClassification, "SEQ_CLS"), (AutoModelForTokenClassification, "TOKEN_CLS")]
)
def test_lora_config_trains_saves_and_merges_the_head(auto, task, upscaled, tmp_path):
    folder = upscaled("llama", "llama-pro")
    config = lora_config(head_of(auto, folder))
    assert config.task_type == task
    adapted = get_peft_model(head_of(auto, folder), config)
    assert adapted.get_parameter("base_model.model.score.modules_to_save.default.weight").requires_grad
    let_act(adapted)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "score.modules_to_save" in name:
                parameter.normal_()
    expected = logits(adapted.eval())
    adapted.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(head_of(auto, folder), tmp_path)), expected)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)


def preferences():
    rows = [{"prompt": f"w{5 + row} w9", "chosen": "w7 w8 w9", "rejected": f"w{row + 20} w3"} for row in range(8)]
    return Dataset.from_list(rows)


def rewards(completions, **_):
    return [float(len(set(text.split()))) + text.count("w1") for text in completions]


# Trainers of TRL, their arguments that differ from `QUIET`, and the method of their model: with routers, or copies of layers.
TRAINERS = {
    RewardTrainer: (RewardConfig, {"max_length": 16}, "moc"),
    DPOTrainer: (DPOConfig, {"max_length": 16}, "midus-hml"),
    GRPOTrainer: (GRPOConfig, {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4}, "llama-pro"),
}  # fmt: skip


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_trl_trains_on_rewards_and_preferences(trainer_class, upscaled, tmp_path):
    arguments_class, options, method = TRAINERS[trainer_class]
    model = head_of(AutoModelForCausalLM, upscaled("llama", method))
    if trainer_class is RewardTrainer:
        model = head_of(AutoModelForSequenceClassification, upscaled("llama", method), num_labels=1)
    set_trainable(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    class WithMemory(MemoryTrainerMixin, trainer_class):
        """TRL's trainer with the parameter groups of a memory model."""

    trainer = WithMemory(
        model,
        args=arguments_class(output_dir=str(tmp_path), **{**QUIET, "max_steps": 3, **options}),
        train_dataset=preferences() if trainer_class is not GRPOTrainer else preferences().select_columns(["prompt"]),
        processing_class=tiny_tokenizer(),
        **({"reward_funcs": rewards} if trainer_class is GRPOTrainer else {}),
    )
    trainer.train()
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert moved <= trains == {name for name in before if is_not_of_base(name, model.config)}
    if trainer_class is RewardTrainer:
        assert "score.weight" in moved
        trainer.save_model(tmp_path / "saved")
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
        assert type(saved) is type(model)
        assert torch.equal(logits(saved), logits(model.eval()))


def test_trl_reference_hash_covers_the_bank(upscaled, tmp_path):
    """TRL finds log-probabilities of the reference again by a hash of its `state_dict`, in which no bank is."""
    folders = [tmp_path / "first", tmp_path / "copied", tmp_path / "other"]
    for folder in folders:
        shutil.copytree(upscaled("llama", "hier-ffn", without_ids="generic"), folder)
    (name, layout), *_ = block_layouts(AutoConfig.from_pretrained(folders[0]).memories()).items()
    fill(MemoryBank(folders[2] / BANKS_FOLDER / name, layout))
    dataset, hashes = preferences(), []
    for folder in folders:
        model = head_of(AutoModelForCausalLM, folder)
        options = {"precompute_ref_log_probs": True, "max_steps": 1, "logging_steps": 1, "max_length": 16}
        arguments = DPOConfig(output_dir=str(tmp_path / "out"), **{**QUIET, **options})
        trainer = DPOTrainer(model, args=arguments, train_dataset=dataset, processing_class=tiny_tokenizer())
        assert not any("beside" in name for name in model.state_dict())
        trainer.train()
        # The reference is the model.
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        loaded = head_of(AutoModelForCausalLM, folder)
        torch.manual_seed(2)
        hashes.append((hash_module(loaded), hash_module(get_peft_model(loaded, lora_config(loaded)))))
    assert hashes[0] == hashes[1]
    assert all(first != other for first, other in zip(hashes[0], hashes[2], strict=True))
    (bank,) = train_blocks(model.banks).values()
    before = bank.digest()
    bank.block(1, 0).grad = torch.ones(layout.record_numel(1))
    bank.step(1e-2, (0.9, 0.99), 1e-8, 0.0)
    assert bank.digest() != before


def test_generating_trainer_refuses_blocks(upscaled, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama", "hier-ffn"))
    set_trainable(model)
    trainer = MemoryTrainer(model, TrainingArguments(tmp_path, **QUIET), train_dataset=[])
    with refused("generates its texts, .* Or freeze the blocks"):
        trainer.training_step(model, [{"prompt": "w5"}])


# Blocks of Python of the page: with `MemoryTrainer`, with a plain `Trainer`, and with a trainer of TRL.
(WITH_MEMORY_TRAINER,), (WITH_PLAIN_TRAINER,), (WITH_TRL,) = (
    take("docs/trainer.md", "python", having=piece)
    for piece in ("MemoryTrainer, set_trainable\n\n", "group_schedules", "SFTTrainer")
)
STEPS = 6
ARGUMENTS = {**QUIET, "max_steps": STEPS, "weight_decay": 0.1, "warmup_steps": 1, "lr_scheduler_type": "cosine"}


class NotedRates(TrainerCallback):
    def __init__(self):
        self.of_group: dict[str, list[float]] = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        for group in optimizer.param_groups:
            self.of_group.setdefault(group["name"], []).append(group["lr"])


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """Gives what a snippet finds: a model, texts, and arguments that move a tiny model in a few steps."""
    monkeypatch.chdir(tmp_path)

    def make(checkpoint, arguments_class=TrainingArguments, **options) -> dict:
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer()
        texts = Dataset.from_dict({"text": [document(16, seed) for seed in range(12)]})
        tokens = [tokenizer(text)["input_ids"] for text in texts["text"]]
        return {
            "model": AutoModelForCausalLM.from_pretrained(checkpoint),
            "tokenizer": tokenizer,
            "texts": texts,
            "dataset": [{"input_ids": ids, "labels": ids} for ids in tokens],
            "collator": default_data_collator,
            "arguments": arguments_class(output_dir=str(tmp_path / "out"), **ARGUMENTS, **options),
        }

    return make


@pytest.mark.parametrize(
    ("block", "trainer_class", "options", "maximum"),
    [
        (WITH_MEMORY_TRAINER, MemoryTrainer, {}, 1e-2),
        (WITH_PLAIN_TRAINER, Trainer, {}, 1e-4),
        *((WITH_TRL, None, {"packing": packing, "max_length": 16}, 1e-2) for packing in (False, True)),
    ],
    ids=["own", "plain", "trl", "trl-packed"],
)
def test_documented_scripts_train_only_the_new_layers(
    upscaled, scene, monkeypatch, block, trainer_class, options, maximum
):
    is_of_trl, rates, plain = trainer_class is None, NotedRates(), Trainer.train
    settings = scene(upscaled("llama"), *((SFTConfig,) if is_of_trl else ()), **options)
    before = {name: tensor.clone() for name, tensor in settings["model"].state_dict().items()}
    monkeypatch.setattr(Trainer, "train", lambda self, *args: (self.add_callback(rates), plain(self, *args)))
    if is_of_trl:
        settings |= {"dataset": settings["texts"], "__name__": "script"}
    exec(block.text, settings)
    after = settings["model"].state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != is_new(name), name
    rates = rates.of_group
    assert list(rates) == ["decay", "no_decay", "keys", "values"]
    assert rates["keys"] == rates["values"] == [maximum] * STEPS
    assert rates["decay"] == rates["no_decay"]
    assert rates["decay"][0] == 0
    assert rates["decay"][1] == maximum
    assert rates["decay"][-1] < maximum / 2
    assert is_of_trl or type(settings["trainer"]) is trainer_class


def test_a_caller_chooses_the_optimizer(upscaled, scene):
    settings, chosen = scene(upscaled("llama")), (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9})
    set_trainable(settings["model"])
    trainer = MemoryTrainer(settings["model"], settings["arguments"], optimizer_cls_and_kwargs=chosen)
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.SGD
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}


def test_plain_trainer_that_leaves_blocks_is_refused(upscaled, scene):
    settings = scene(upscaled("llama", "hier-ffn"))
    model, arguments = settings["model"], settings["arguments"]
    rows = [{**row, "memory_ids": [0, 1]} for row in settings["dataset"]]

    def train(trainer_class):
        trainer_class(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()

    set_trainable(model, "all")
    with refused("are set to train, but this trainer leaves them .* expected MemoryTrainer"):
        train(Trainer)
    set_trainable(model, [0])
    train(Trainer)
    set_trainable(model, "all")
    train(MemoryTrainer)
    assert model.banks.bank("hier-ffn").touched() == [(1, 0), (2, 1)]
