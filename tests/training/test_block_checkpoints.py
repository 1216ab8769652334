"""Checkpoints of runs that train blocks: what is resumed and chosen includes the blocks."""

from pathlib import Path

import pytest
import torch
from training.block_runs import assert_same_blocks, bank_of, config_of
from training.outcomes import as_it_was_at
from training.tiny_run import best_at, document, give_held_out_losses, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.run import train
from midus_hf.training.trainer import MemoryTrainer

OPTIONS = {"save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(fetching, assigned, tmp_path_factory) -> Path:
    """Return the output of a run with all of its checkpoints, which nobody may change."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(config_of(fetching, assigned, output, **OPTIONS))
    return output


def test_a_run_that_ended_before_its_model_was_saved_is_resumed_with_its_blocks(whole, blocks_for, tmp_path):
    output = as_it_was_at(6, whole, tmp_path / "out")
    train(blocks_for(resume_from_checkpoint=True, **OPTIONS))
    assert bank_of(whole).written(1)
    assert_same_blocks(bank_of(output), bank_of(whole))


def test_the_model_of_the_best_step_comes_with_the_blocks_of_that_step(blocks_for, tmp_path, monkeypatch):
    give_held_out_losses(monkeypatch, best_at(4))
    texts = tmp_path / "held_out.jsonl"
    texts.write_text(f'{{"text": "{document(60, 99)}", "memory_ids": [0, 0]}}\n')
    changes = {"eval_text": str(texts), "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    changes |= {"lr_scheduler_type": "constant"}
    train(blocks_for(**changes, save_steps=2))
    monkeypatch.undo()
    train(blocks_for("four", max_steps=4, lr_scheduler_type="constant"))
    assert_same_blocks(bank_of(tmp_path / "out"), bank_of(tmp_path / "four"))


def test_checkpoints_hold_the_blocks_that_changed_and_no_bank(whole):
    folder = whole / "checkpoint-4"
    assert not (folder / "memory_bank").exists() and not list(folder.glob("model*.safetensors"))
    names = sorted(path.name for path in folder.glob("block_states/0/*"))
    assert names == ["level-1.safetensors", "level-2.safetensors"]


def test_a_script_of_ones_own_gets_the_blocks_of_the_best_step_as_well(fetching, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(fetching)
    set_trainable(model)
    learned, held_out = (tiny_tokenizer()(document(40, seed), return_tensors="pt").input_ids[0] for seed in (0, 99))
    rows = [{"input_ids": ids, "labels": ids, "memory_ids": torch.tensor([1, 4])} for ids in (learned, held_out)]
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=6,
        learning_rate=3e-2,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="given",
        greater_is_better=False,
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
    )
    scores = iter([3.0, 1.0, 2.0])
    trainer = MemoryTrainer(
        model,
        arguments,
        train_dataset=rows[:1],
        eval_dataset=rows[1:],
        compute_metrics=lambda prediction: {"given": next(scores)},
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-4"
    model.save_pretrained(tmp_path / "saved")
    last = AutoModelForCausalLM.from_pretrained(fetching)
    set_trainable(last)
    again = MemoryTrainer(last, arguments, train_dataset=rows[:1], eval_dataset=rows[1:])
    again._load_from_checkpoint(str(best))
    last.save_pretrained(tmp_path / "best")
    assert_same_blocks(bank_of(tmp_path / "saved"), bank_of(tmp_path / "best"))
