"""Checkpoints of runs that train blocks: what is resumed and chosen includes the blocks."""

from pathlib import Path

import pytest
from training.block_runs import assert_same_blocks, bank_of, config_of
from training.outcomes import as_it_was_at
from training.tiny_run import best_at, document, give_held_out_losses

from midus_hf.training.run import train

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
