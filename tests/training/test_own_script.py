"""What the documents say to do in a script of one's own trains the new layers, all of them, and leaves the base alone."""

import pytest
import torch
from datasets import Dataset
from training.tiny_run import QUIET, document, is_new, refused, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator
from trl import SFTConfig

from midus_hf.training.optim import set_trainable
from midus_hf.training.trainer import MemoryTrainer
from tests.docs.snippets import take

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
    assert rates["keys"] == rates["values"] == [maximum] * STEPS and rates["decay"] == rates["no_decay"]
    assert rates["decay"][0] == 0 and rates["decay"][1] == maximum and rates["decay"][-1] < maximum / 2
    assert is_of_trl or type(settings["trainer"]) is trainer_class


def test_a_caller_chooses_the_optimizer(upscaled, scene):
    settings, chosen = scene(upscaled("llama")), (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9})
    set_trainable(settings["model"])
    trainer = MemoryTrainer(settings["model"], settings["arguments"], optimizer_cls_and_kwargs=chosen)
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.SGD and {group["lr"] for group in optimizer.param_groups} == {1e-2}


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
