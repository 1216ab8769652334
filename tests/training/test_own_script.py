"""What the documents say to do in a script of one's own trains the new layers, all of them, and leaves the base alone."""

import re

import pytest
import torch
from datasets import Dataset
from training.steered_runs import NotedRates
from training.tiny_run import NEW_LAYERS, document, refused, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig

from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.trainer import MemoryTrainer
from tests.docs.snippets import take

# Blocks of Python of the page: with `MemoryTrainer`, with a plain `Trainer`, and with a trainer of TRL.
(WITH_MEMORY_TRAINER,), (WITH_PLAIN_TRAINER,), (WITH_TRL,) = (
    take("docs/trainer.md", "python", having=piece)
    for piece in ("MemoryTrainer, set_trainable\n\n", "group_schedules", "SFTTrainer")
)
STEPS = 6
ARGUMENTS = {
    **{"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1},
    **{"warmup_steps": 1, "lr_scheduler_type": "cosine", "use_cpu": True, "bf16": False, "logging_steps": 1},
    **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True},
}


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


def watch_rates(monkeypatch) -> dict[str, list[float]]:
    """Of every optimizer step that a Trainer takes from now on: the rate of each group."""
    rates, plain = NotedRates(), Trainer.train

    def train(self, *args, **kwargs):
        self.add_callback(rates)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", train)
    return rates.of_group


def is_new(name: str) -> bool:
    result = re.search(r"layers\.(\d+)\.", name)
    return result is not None and int(result[1]) in NEW_LAYERS


def check_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Every tensor of the new layers has moved, and no other by one bit."""
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != is_new(name), name


def check_rates(rates: dict[str, list[float]], maximum: float) -> None:
    assert list(rates) == ["decay", "no_decay", "keys", "values"]
    assert rates["keys"] == rates["values"] == [maximum] * STEPS
    assert rates["decay"] == rates["no_decay"]
    assert rates["decay"][0] == 0 and rates["decay"][1] == maximum and rates["decay"][-1] < maximum / 2


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("block", "trainer_class"),
    [(WITH_MEMORY_TRAINER, MemoryTrainer), (WITH_PLAIN_TRAINER, Trainer)],
    ids=["own", "plain"],
)
def test_what_is_said_for_trainer(upscaled, scene, monkeypatch, block, trainer_class):
    settings = scene(upscaled("llama"))
    before, rates = state(settings["model"]), watch_rates(monkeypatch)
    exec(block.text, settings)
    check_moved(before, settings["model"].state_dict())
    check_rates(rates, 1e-4 if trainer_class is Trainer else 1e-2)
    assert type(settings["trainer"]) is trainer_class


@pytest.mark.parametrize("packing", [False, True])
def test_a_trainer_of_trl_trains_the_new_layers_alone(upscaled, scene, monkeypatch, packing):
    settings = scene(upscaled("llama"), SFTConfig, max_length=16, packing=packing)
    before, rates = state(settings["model"]), watch_rates(monkeypatch)
    exec(WITH_TRL.text, {**settings, "dataset": settings["texts"], "__name__": "script"})
    check_moved(before, settings["model"].state_dict())
    check_rates(rates, 1e-2)


@pytest.mark.parametrize(
    ("method", "arguments", "more", "message"),
    [
        ("hier-ffn", {"fp16": True}, {}, "blocks of a memory bank train, which FSDP, DeepSpeed and fp16 do not support"),
        *(
            ("hier-ffn", {"optim": optim}, {}, f"optimizer, which {name} does not give; expected an optimizer such as optim")
            for optim, name in (("sgd", "SGD"), ("adafactor", "Adafactor"))
        ),
        *(
            ("hier-ffn", {}, more, f"which {given} does not give; expected an optimizer such as optim: adamw_torch")
            for more, given in (
                ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "SGD"),
                ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "a Trainer with an optimizer of its own"),
            )
        ),
        *(
            ("ultramem-v2", {"optim": optim, "sparse_values": True}, {}, f"optim is '{optim}'; expected adamw_torch or")
            for optim in ("adafactor", "adamw_torch_8bit", "adamw_torch_4bit")
        ),
        *(
            ("ultramem-v2", {"sparse_values": True}, more, "the Trainer was given an optimizer, which would be replaced")
            for more in (
                {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
                {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
            )
        ),
        ("moc", {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor is set, with which the Trainer computes the"),
        ("moc", {}, {"compute_loss_func": print}, "compute_loss_func is set, with which the Trainer computes the loss itself"),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_do_with_its_arguments_is_refused(
    method, arguments, more, message, upscaled, corpus, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama", method))
    set_trainable(model, "auto")
    options = tiny_config(None, corpus, tmp_path, config_name="c", tokenizer_name="t")
    for name, value in arguments.items():
        setattr(options, name, value)
    with refused(message):
        MemoryTrainer(model, options, **more)


def test_a_caller_chooses_the_optimizer(upscaled, scene):
    settings = scene(upscaled("llama"))
    set_trainable(settings["model"])
    trainer = MemoryTrainer(
        settings["model"],
        settings["arguments"],
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
    )
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.SGD and {group["lr"] for group in optimizer.param_groups} == {1e-2}
