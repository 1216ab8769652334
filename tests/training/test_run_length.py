"""How much a run reads, and how far it is: a line says so."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from training.outcomes import logged
from training.tiny_run import PreparedRun, document, letter_tokenizer, save_upscaled
from transformers import AutoModelForCausalLM

from midus_hf.cli.train import main
from midus_hf.sources import progress as library_bars
from midus_hf.training import callbacks
from midus_hf.training.run import measure_texts, run_training
from midus_hf.training.trainer import MemoryTrainer

NUMBERS = ["w1", "w22", "w333", "w4", "w555"]


def glossary() -> list[str]:
    """Twenty made-up products, of each four sentences that name it."""
    return [
        " ".join(f"w{product}0 w{fact} {NUMBERS[(product + fact) % 5]}" for fact in range(4)) for product in range(20)
    ]


def test_short_run_reads_every_fact_in_100_steps(tmp_path, monkeypatch, capsys):
    model = save_upscaled("llama", tmp_path, tokenizer=letter_tokenizer())
    read: list[list[int]] = []
    step = MemoryTrainer.training_step

    def training_step(trainer, model, inputs, *args, **kwargs):
        assert inputs["input_ids"].shape[1] == 60
        read.extend(row[row != -100].tolist() for row in inputs["labels"])
        return step(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(MemoryTrainer, "training_step", training_step)
    texts = tmp_path / "glossary.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in glossary()))
    tokens = [token for text in glossary() for token in [*letter_tokenizer()(text)["input_ids"], 2]]
    whole, rest = divmod(len(tokens), 60)
    assert rest > 0.01 * len(tokens)
    output = tmp_path / "out"
    words = [
        str(texts),
        f"--model={model}",
        f"--output={output}",
        "--sequence_length=60",
        "--bf16=false",
        "--save_steps=90",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    epochs = math.ceil(100 / math.ceil((whole + 1) / 4))
    assert "num_train_epochs=3 (more for fewer than 100 steps)" in err and " few," not in err
    steps = epochs * math.ceil((whole + 1) / 4)
    said = (
        f"corpus: {len(tokens):,} of {len(tokens):,} tokens are read, in {whole + 1} sequences of 60, the last padded; "
        f"{steps} steps ({epochs} times each)\n"
    )
    assert said in out
    expected = [tokens[begin : begin + 60] for begin in range(0, len(tokens), 60)]
    assert sorted(read) == sorted(expected * epochs)
    assert "num_train_epochs: null\n" in (output / "train_config.yaml").read_text()
    assert f"num_train_epochs: {epochs}\n" in (output / "README.md").read_text()
    losses = logged(output)
    assert main([*words, f"--resume_from_checkpoint={output / 'checkpoint-90'}"]) == 0
    assert logged(output) == losses


@pytest.mark.parametrize(
    ("keys", "steps", "line"),
    [
        ({"max_steps": 3}, "3 steps (8% of the sequences)", "3 steps are few, in which a model learns little: raise max_steps\n"),
        (
            {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 20},
            "2 steps (once each)",
            "2 steps are few, in which a model learns little: num_train_epochs=50 takes at least 100\n",
        ),
        (
            {"max_steps": 3, "gradient_accumulation_steps": 400}, "3 steps (3 times each)",
            "3 steps are few, in which a model learns little: raise max_steps\n",
        ),
        (
            {"max_steps": 3, "gradient_accumulation_steps": 30}, "3 steps (1.79 times each)",  # 38 batches of 2, in 2 steps an epoch
            "3 steps are few, in which a model learns little: raise max_steps\n",
        ),
        (
            {"max_steps": 3, "per_device_train_batch_size": 50, "dataloader_drop_last": True}, "3 steps (1.97 times each)",
            "3 steps are few, in which a model learns little: raise max_steps\n",
        ),
        ({"max_steps": 30}, "30 steps (79% of the sequences)", None),
    ],
)  # fmt: skip
def test_few_steps_are_said_with_what_gives_more(keys, steps, line, config_for, capsys):
    run_training(config_for(**keys))
    out, err = capsys.readouterr()
    assert err.endswith(line) if line else "few" not in err
    read = (
        "corpus: 1,216 of 1,220 tokens are read, in 76 sequences of 16; the last 4 fill no sequence and are dropped; "
    )
    assert f"{read}{steps}\n" in out


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
    assert len(sequences) == 6 and tokens == 15 * 5 + 3
    assert measured == pytest.approx([total / tokens] * 4, rel=1e-6)


def test_progress_of_a_run_is_printed_in_lines_each_minute(config_for, corpus, monkeypatch, capsys):
    monkeypatch.setattr(library_bars, "_SECONDS_PER_LINE", 0)
    run_training(
        config_for(max_steps=2, eval_text=str(corpus), eval_on_start=True, eval_strategy="steps", eval_steps=2)
    )
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("training:   0%|          | 0/2 ") for line in lines)
    assert any(line.startswith("evaluating:   0%|          | 0/") for line in lines)


@pytest.mark.parametrize(
    ("changes", "processor_seconds", "is_noted"),
    [({}, 5.0, True), ({}, 11.0, False), ({"world_size": 2}, 5.0, False), ({"threads": 1}, 5.0, False)]
    + [({"device": torch.device("meta")}, 5.0, False)],
)
def test_busy_cores_are_noted_once(changes, processor_seconds, is_noted, monkeypatch, capsys):
    given = {"world_size": 1, "device": torch.device("cpu"), "threads": 2, **changes}
    monkeypatch.setattr(torch, "get_num_threads", lambda: given["threads"])
    clock = SimpleNamespace(seconds=0.0)
    times = {"monotonic": lambda: clock.seconds, "process_time": lambda: clock.seconds * processor_seconds / 12}
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(**times))
    note = callbacks.BusyCoresNote()
    for _ in range(6):
        note.on_step_begin(SimpleNamespace(**given), None, None)
        clock.seconds += 6
        note.on_step_end(SimpleNamespace(**given), None, None)
        clock.seconds += 60  # between steps, as for an evaluation
    assert capsys.readouterr().err.count("With OMP_NUM_THREADS=1 none waits") == is_noted
