"""A run trains what it should, leaves the rest as it was, says how far it is, and can be resumed exactly; or makes a new model."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from look.upscaled_folders import METHODS, acting, loaded, saved_pair
from pairs import by_default
from safetensors.torch import load_file
from tiny import FAMILIES, save_tiny_model
from training.outcomes import (
    assert_close_weights,
    assert_resumes,
    assert_same_blocks,
    bank_of,
    by_step,
    logged,
    moved,
    weights,
)
from training.tiny_run import (
    NEW_LAYERS,
    PreparedRun,
    best_at,
    document,
    give_held_out_losses,
    is_new,
    letter_tokenizer,
    refused,
    save_upscaled,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
)

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.cli.train import main
from midus_hf.sources import progress as library_bars
from midus_hf.training import base_divergence, callbacks
from midus_hf.training.base_divergence import base_logits, check_base_divergence, divergence_without_target
from midus_hf.training.checkpoints import load_checkpoint
from midus_hf.training.optim import set_trainable
from midus_hf.training.run import measure_texts, run_training
from midus_hf.training.trainer import MemoryTrainer
from upscalers.runs.upscale import upscale


def test_only_new_tensors_move_and_the_model_loads(family, upscaled, config_for, tmp_path):
    source, trained = upscaled(family), tmp_path / "out"
    run = PreparedRun(config_for("out", family, max_steps=6))
    batch = next(iter(run.trainer.get_train_dataloader()))
    logits = AutoModelForCausalLM.from_pretrained(source).train()(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    result = run.execute()
    assert (result.steps, result.tokens) == (6, 6 * 2 * 16)
    assert logged(trained)[0] == pytest.approx(expected.item(), rel=1e-6)
    assert moved(source, trained) == {name for name in weights(source) if is_new(name)} != set()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, trained))
    assert after == before
    assert (trained / "upscale.json").read_bytes() == (source / "upscale.json").read_bytes()
    assert AutoTokenizer.from_pretrained(trained)("w5 w6")["input_ids"] == [5, 6]
    assert AutoModelForCausalLM.from_pretrained(trained).config.upscale["new_layers"] == NEW_LAYERS
    assert not [path.name for path in trained.iterdir() if path.suffix in (".bin", ".pt", ".pth") or path.is_dir()]


KINDS = {
    "bf16 and a sparse log": {"bf16": True, "logging_steps": 3},
    "num_train_epochs": {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 20},
    "checkpointing": {"gradient_accumulation_steps": 2, "logging_steps": 4, "activation_checkpointing": True, "max_grad_norm": 0.01},
    "memory": {"value_schedule": "4x-to-1x", "memory_learning_rate": 2e-2, "value_weight_decay": 0.1, "neftune_noise_alpha": 1.0},
    "smoothed": {"label_smoothing_factor": 0.1, "optim": "adafactor"},
    "frozen": {"frozen": ["value"], "adam_beta2": 0.95, "trainable": "all", "document_mask": True, "family": "gemma3"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_exactly(kind, config_for):
    assert_resumes(config_for, 4, **{"max_steps": 7, **KINDS[kind]})


def test_checkpoint_has_trained_tensors_and_two_are_kept(config_for, upscaled, tmp_path):
    run_training(config_for(save_steps=4, max_steps=12))
    folders = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [path.name for path in folders] == ["checkpoint-12", "checkpoint-8"]
    files = "inputs.json manifest.json optimizer.pt rng_state.pth scheduler.pt trained.safetensors trainer_state.json"
    assert sorted(path.name for path in folders[0].iterdir()) == files.split()
    new = {name for name in weights(upscaled("llama")) if is_new(name)}
    assert set(load_file(folders[0] / "trained.safetensors")) == new
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    with refused("also has model.layers.1.input_layernorm.weight"):
        load_checkpoint(model.requires_grad_(False), folders[0])
    set_trainable(model)
    load_checkpoint(model, folders[0])
    saved = weights(tmp_path / "out")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    with refused("has no trained.safetensors; expected a checkpoint"):
        load_checkpoint(model, tmp_path)


def test_held_out_text_is_measured_and_the_best_model_is_saved(config_for, corpus, tmp_path, monkeypatch):
    options = {"eval_text": str(corpus), "eval_steps": 2, "save_steps": 2, "max_steps": 6}
    run_training(config_for("last", **options, save_total_limit=None))
    losses = by_step(tmp_path / "last", "eval_loss")
    assert list(losses) == [2, 4, 6]
    assert losses[6] < losses[2]
    assert by_step(tmp_path / "last", "eval_perplexity") == {step: math.exp(loss) for step, loss in losses.items()}
    give_held_out_losses(monkeypatch, best_at(2))
    options["load_best_model_at_end"] = True
    run_training(config_for("best", **options))
    monkeypatch.undo()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    set_trainable(model)
    load_checkpoint(model, tmp_path / "last" / "checkpoint-2")

    def is_best(output):
        saved = weights(tmp_path / output)
        return all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())

    assert is_best("best")
    (tmp_path / "best").rename(tmp_path / "moved")
    run_training(config_for("moved", **options, resume_from_checkpoint=True))
    assert is_best("moved")


@pytest.mark.parametrize(
    ("family", "bf16"), [*((family, True) for family in by_default(["gemma2"], FAMILIES)), ("llama", False)]
)
def test_new_tensors_of_a_bfloat16_base_train_in_float32(family, bf16, config_for, tmp_path):
    model = save_upscaled(family, tmp_path, dtype=torch.bfloat16)
    run = PreparedRun(config_for(model=model, bf16=bf16, max_steps=6))
    for name, parameter in run.model.named_parameters():
        assert parameter.dtype is (torch.float32 if is_new(name) or not bf16 else torch.bfloat16), name
    run.execute()
    assert moved(model, tmp_path / "out") == {name for name in weights(model) if is_new(name)}
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_document_mask_gives_positions_and_no_cache(config_for):
    run = PreparedRun(config_for(document_mask=True, sequence_length=122))
    batch = next(iter(run.trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert run.model.config.use_cache is False
    restarts = batch["position_ids"][:, 1:] == 0
    assert restarts.any()
    assert torch.equal(batch["labels"][:, 1:] == -100, restarts)


# Twenty made-up products, each with four sentences that name it.
FACTS = ("w1", "w22", "w333", "w4", "w555")
PRODUCTS = [" ".join(f"w{name}0 w{fact} {FACTS[(name + fact) % 5]}" for fact in range(4)) for name in range(20)]


def test_short_run_reads_every_fact_in_100_steps(tmp_path, monkeypatch, capsys):
    model = save_upscaled("llama", tmp_path, tokenizer=letter_tokenizer())
    read: list[list[int]] = []
    step = MemoryTrainer.training_step

    def training_step(trainer, model, inputs, *args, **kwargs):
        assert inputs["input_ids"].shape[1] == 60
        read.extend(row[row != -100].tolist() for row in inputs["labels"])
        return step(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(MemoryTrainer, "training_step", training_step)
    texts, output = tmp_path / "products.jsonl", tmp_path / "out"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PRODUCTS))
    tokens = [token for text in PRODUCTS for token in [*letter_tokenizer()(text)["input_ids"], 2]]
    expected = [tokens[begin : begin + 60] for begin in range(0, len(tokens), 60)]
    assert 0.01 * len(tokens) < len(expected[-1]) < 60
    options = ["--sequence_length=60", "--bf16=false", "--save_steps=90"]
    words = [str(texts), f"--model={model}", f"--output={output}", *options]
    assert main(words) == 0
    out, err = capsys.readouterr()
    per_epoch = math.ceil(len(expected) / 4)
    epochs = math.ceil(100 / per_epoch)
    assert "num_train_epochs=3 (more for fewer than 100 steps)" in err
    assert " few," not in err
    assert (
        f"in {len(expected)} sequences of 60, the last padded; {epochs * per_epoch} steps ({epochs} times each)" in out
    )
    assert sorted(read) == sorted(expected * epochs)
    assert "num_train_epochs: null\n" in (output / "train_config.yaml").read_text()
    assert f"num_train_epochs: {epochs}\n" in (output / "README.md").read_text()
    losses = logged(output)
    assert main([*words, f"--resume_from_checkpoint={output / 'checkpoint-90'}"]) == 0
    assert logged(output) == losses


@pytest.mark.parametrize("streaming", [False, True])
def test_max_steps_need_no_epochs(streaming, config_for):
    assert run_training(config_for(num_train_epochs=None, max_steps=2, streaming=streaming)).steps == 2


@pytest.mark.parametrize(
    ("keys", "steps", "remedy"),
    [
        ({"max_steps": 3}, "3 steps (8% of the sequences)", "raise max_steps"),
        ({"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 20}, "2 steps (once each)", "num_train_epochs=50"),
        ({"max_steps": 3, "gradient_accumulation_steps": 400}, "3 steps (3 times each)", "raise max_steps"),
        # 38 batches of 2, in 2 steps an epoch
        ({"max_steps": 3, "gradient_accumulation_steps": 30}, "3 steps (1.79 times each)", "raise max_steps"),
        ({"max_steps": 3, "per_device_train_batch_size": 50, "dataloader_drop_last": True}, "3 steps (1.97 times each)", "raise"),
        ({"max_steps": 30}, "30 steps (79% of the sequences)", None),
    ],
)  # fmt: skip
def test_few_steps_are_said_with_what_gives_more(keys, steps, remedy, config_for, capsys):
    run_training(config_for(**keys))
    out, err = capsys.readouterr()
    assert f"{steps.partition(' (')[0]} are few" in err and remedy in err if remedy else "few" not in err
    assert (
        f"1,216 of 1,220 tokens are read, in 76 sequences of 16; the last 4 fill no sequence and are dropped; {steps}\n"
        in out
    )


@pytest.mark.parametrize("keys", [{}, {"document_mask": True}, {"dataloader_drop_last": True}], ids=str)
def test_held_out_loss_is_per_token_at_any_batch_size(keys, config_for, upscaled, corpus, tmp_path):
    held_out = tmp_path / "held.txt"
    held_out.write_text(document(16 * 5 + 3, 7))
    measured = []
    for size in (1, 2, 3, 8):
        config = config_for(f"{size}", eval_text={"a": str(held_out)}, per_device_eval_batch_size=size, **keys)
        measured.append(measure_texts(config)["a"])
    sequences = PreparedRun(config).trainer.eval_dataset["a"]
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama")).eval()
    total, tokens = 0.0, 0
    for row in sequences:
        labels = torch.tensor([row.get("labels", row["input_ids"])])
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(torch.tensor([row["input_ids"]]), labels=labels).loss.item() * count
        tokens += count
    assert len(sequences) == 6
    assert tokens == 15 * 5 + 3
    assert measured == pytest.approx([total / tokens] * 4, rel=1e-6)


def test_progress_of_a_run_is_printed_in_lines_each_minute(config_for, corpus, monkeypatch, capsys):
    monkeypatch.setattr(library_bars, "_SECONDS_PER_LINE", 0)
    keys = {"eval_text": str(corpus), "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}
    run_training(config_for(max_steps=2, **keys))
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("training:   0%|          | 0/2 ") for line in lines)
    assert any(line.startswith("evaluating:   0%|          | 0/") for line in lines)


@pytest.mark.parametrize(
    ("changes", "processor_seconds", "is_noted"),
    [({}, 5.0, True), ({}, 11.0, False), *(({name: value}, 5.0, False) for name, value in
      {"world_size": 2, "threads": 1, "device": torch.device("meta")}.items())],
)  # fmt: skip
def test_busy_cores_are_noted_once(changes, processor_seconds, is_noted, monkeypatch, capsys):
    given = {"world_size": 1, "device": torch.device("cpu"), "threads": 2, **changes}
    monkeypatch.setattr(torch, "get_num_threads", lambda: given["threads"])
    clock = SimpleNamespace(seconds=0.0)
    times = {"monotonic": lambda: clock.seconds, "process_time": lambda: clock.seconds * processor_seconds / 12}
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(**times))
    note = callbacks.RunReport("", 1)
    for _ in range(6):
        note.on_step_begin(SimpleNamespace(**given), None, None)
        clock.seconds += 6
        note.on_step_end(SimpleNamespace(**given), None, None)
        clock.seconds += 60  # between steps, as for an evaluation
    assert capsys.readouterr().err.count("With OMP_NUM_THREADS=1 none waits") == is_noted


MEMORIES = {
    "midus-hml": {"type": "midus-hml", "n": 4, "k": 2, "layers": [1]},
    "chapters": {"type": "moc", "memory_tokens": 32, "chapters": 8, "k": 2, "chunk_size": 4, "layers": [1, 3]},
}


def shape(memory: str | None) -> PreTrainedConfig:
    native = FAMILIES["llama"].config()
    if memory is None:
        return native
    values = {key: value for key, value in native.to_dict().items() if key != "model_type"}
    return AutoConfig.for_model("midus_llama", **values, memory=[MEMORIES[memory]])


@pytest.mark.parametrize("memory", by_default(["chapters"], [None, *MEMORIES]))
def test_new_model_trains_whole_and_is_saved_with_its_card(memory, begun, tmp_path):
    run = PreparedRun(begun(model_config=shape(memory), max_steps=60, seed=3))
    start = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    run.execute()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert trained.keys() == start.keys()
    # A memory adds zero at first, and what is in front of what starts at zero learns once that has moved.
    assert [name for name, tensor in start.items() if torch.equal(tensor, trained[name])] == []
    losses = logged(tmp_path / "out")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w7")["input_ids"] == [5, 7]
    assert "_name_or_path" not in (tmp_path / "out" / "config.json").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert "base_model" not in yaml.safe_load(front)
    assert text.startswith("\n# out\n")
    assert str(tmp_path) not in card
    assert "the weights were initialised at random with seed 3, for the config `shape.json`" in " ".join(text.split())
    report = yaml.safe_load(re.search(r"```yaml\n(.*)```\n$", card, flags=re.DOTALL)[1])
    of_origin = {key: value for key, value in report.items() if key.endswith(("_name", "_name_or_path"))}
    assert of_origin == {"config_name": "shape.json", "tokenizer_name": "tokenizer"}
    assert report["trainable"] == "all"


def test_run_that_began_a_new_model_resumes_exactly(begun):
    assert_resumes(begun, 2, max_steps=4)


def test_new_model_from_a_folder_follows_the_seed(upscaled, begun, tmp_path):
    upscaled_model = upscaled("llama")
    run = PreparedRun(begun(config_name=str(upscaled_model)))
    saved = AutoModelForCausalLM.from_pretrained(upscaled_model).state_dict()
    made = run.model.state_dict()
    again, other = (
        PreparedRun(begun(name, config_name=str(upscaled_model), seed=seed)).model.state_dict()
        for name, seed in (("again", 42), ("other", 2))
    )
    assert made.keys() == saved.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(made[name], saved[name])
    assert not torch.equal(made[name], other[name])
    assert not hasattr(run.model.config, "upscale")
    for trainable in ("new", ["value"]):
        with refused("config of this midus_llama model records no new"):
            PreparedRun(begun("new", config_name=str(upscaled_model), trainable=trainable))


def test_divergence_leaves_out_the_next_token(monkeypatch):
    torch.manual_seed(0)
    logits, base = (3 * torch.randn(2, 7, 11, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(11, (2, 7))
    labels[0, 3] = labels[1, 0] = -100
    expected = 0.0
    for row in range(2):
        for position in range(6):
            target = labels[row, position + 1].item()
            if target == -100:
                continue
            rest = [token for token in range(11) if token != target]
            q, p = (each[row, position, rest].softmax(0) for each in (base, logits))
            expected += (q * (q.log() - p.log())).sum().item()
    for size in (256, 2):
        monkeypatch.setattr(base_divergence, "_TOKENS_AT_A_TIME", size)
        assert divergence_without_target(logits, base, labels).item() == pytest.approx(expected, rel=1e-12), size
        assert torch.autograd.gradcheck(
            lambda logits: divergence_without_target(logits, base, labels), logits.clone().requires_grad_()
        )
    assert divergence_without_target(logits, base, torch.full_like(labels, -100)).item() == 0.0
    half = divergence_without_target(logits.bfloat16(), base.bfloat16(), labels)
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_base_logits_are_exact_after_training(method, family):
    base, model = map(loaded, saved_pair(family, method))
    acting(model).train()
    ids = torch.randint(3, 100, (2, 12))
    with torch.no_grad():
        expected = base(ids).logits
        assert torch.equal(base_logits(model, {"input_ids": ids, "labels": ids}), expected)
        assert model.training
        assert not torch.equal(model(ids).logits, expected)


ADAPTERS = {"adapters": {"r": 4, "lora_dropout": 0.5}}


@pytest.mark.parametrize("options", [{}, ADAPTERS, {"attn_implementation": "eager", "bf16": True}, None], ids=str)
def test_passes_of_the_base_leave_nothing_behind(options, config_for, blocks_for, upscaled, tmp_path):
    """A run that computes the divergence, and gives it no weight, is the run without it; the base fetches no blocks."""
    model = upscaled("llama", "ultramem-v2")
    make = blocks_for if options is None else partial(config_for, model=model, max_steps=4, **options)
    PreparedRun(make("without")).execute()
    run = PreparedRun(make("with", base_kl=1.0))
    run.trainer.base_kl = 1e-300
    run.execute()
    assert moved(tmp_path / "with", tmp_path / "without") == set()
    if options is None:
        assert_same_blocks(bank_of(tmp_path / "without"), bank_of(tmp_path / "with"))
    assert logged(tmp_path / "with") == logged(tmp_path / "without")
    diverged = logged(tmp_path / "with", "base_divergence")
    assert diverged[0] < 1e-6
    assert diverged[-1] > 1e-9


def test_the_logged_loss_has_the_weighted_divergence(config_for, tmp_path):
    run = PreparedRun(config_for("heavy", base_kl=2.0, max_steps=1))
    ids = next(iter(run.trainer.get_train_dataloader()))["input_ids"]
    acting(run.model)
    with torch.no_grad():
        outputs = run.model(input_ids=ids, labels=ids)
        base = base_logits(run.model, {"input_ids": ids})
        divergence = divergence_without_target(outputs.logits, base, ids) / (ids.numel() - len(ids))
    run.execute()
    assert logged(tmp_path / "heavy", "base_divergence") == [pytest.approx(divergence.item(), rel=1e-4)]
    assert logged(tmp_path / "heavy")[0] == pytest.approx((outputs.loss + 2 * divergence).item(), rel=1e-4)


def test_accumulation_weighs_divergence_as_one_batch(config_for, tmp_path):
    options = {"base_kl": 3.0, "max_steps": 4, "optim": "sgd", "learning_rate": 0.1}
    run_training(config_for("one", per_device_train_batch_size=4, **options))
    run_training(config_for("two", gradient_accumulation_steps=2, **options))
    assert_close_weights(tmp_path / "one", tmp_path / "two")
    for name in ("loss", "base_divergence"):
        assert logged(tmp_path / "two", name) == pytest.approx(logged(tmp_path / "one", name), rel=1e-3)


def test_base_kl_run_resumes_and_evaluates_without_it(config_for, corpus, tmp_path):
    held_out = {"eval_text": str(corpus), "eval_steps": 7}
    assert_resumes(config_for, 4, max_steps=7, base_kl=50.0, **held_out)
    (held,) = logged(tmp_path / "whole", "eval_loss")
    (measured,) = measure_texts(config_for("measured", model=tmp_path / "whole", **held_out)).values()
    assert held == pytest.approx(measured, rel=1e-6)
    assert logged(tmp_path / "whole", "base_divergence")[-1] > 1e-4


def trainer_of(model, **changes) -> SimpleNamespace:
    of_processes = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "accelerator": SimpleNamespace()}
    return SimpleNamespace(model=model, args=SimpleNamespace(base_kl=0.3), **{**of_processes, **changes})


def test_models_without_a_base_are_refused(upscaled, tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    upscale(base=base, method="stack", output=tmp_path / "stack", options={"layers": "0-2,1-3"}, verify=False)
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    set_trainable(model)
    check_base_divergence(trainer_of(model))
    stack = AutoModelForCausalLM.from_pretrained(tmp_path / "stack").requires_grad_(False)
    shared = "processes that hold whole models. Start"
    for trainer, expected in (
        (
            trainer_of(AutoModelForSequenceClassification.from_pretrained(base)),
            "the model has no language model's head",
        ),
        (trainer_of(model, is_deepspeed_enabled=True, deepspeed=None), shared),
        (trainer_of(model, is_fsdp_enabled=True), shared),
        (trainer_of(model, accelerator=SimpleNamespace(parallelism_config=object())), shared),
        (trainer_of(stack), "the model lacks layers of its base"),
    ):
        with refused(f"base_kl is 0.3, and .*{expected}"):
            check_base_divergence(trainer)
