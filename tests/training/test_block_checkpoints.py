"""Checkpoints of runs that train blocks: what is resumed, chosen, removed and replaced includes the blocks."""

import re
from pathlib import Path

import pytest
from training.block_runs import assert_same_blocks, bank_of, config_of
from training.outcomes import as_it_was_at, flip
from training.tiny_run import best_at, document, give_held_out_losses, refused

from midus_hf.training.output.run_checkpoints import damage_of, finish_checkpoint
from midus_hf.training.run.train import train

OPTIONS = {"save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(models, assigned, tmp_path_factory) -> Path:
    """Return the output of a run with all of its checkpoints, which nobody may change."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(config_of(models / "hier-ffn", assigned, output, **OPTIONS))
    return output


# The file of which a byte is flipped, which byte, and what is said of it.
DAMAGES = {
    "the header of a state": ("block_states/0/level-1.safetensors", 9, r"the state of blocks in .* is damaged"),
    "the list of states": ("block_states/0/touched.json", 0, r"the state of blocks in .* is damaged"),
    "the header of weights": ("model.safetensors", 8, r"Error while deserializing header"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_damaged_before_its_manifest_was_written_is_passed_over(name, whole, blocks_for, tmp_path, capsys):
    """As by memory that forgets: the digests in the manifest are those of the damaged files."""
    file, byte, reason = DAMAGES[name]
    output = as_it_was_at(4, whole, tmp_path / "out")
    flip(output / "checkpoint-4" / file, byte)
    finish_checkpoint(output / "checkpoint-4", ())
    assert damage_of(output / "checkpoint-4") is None
    capsys.readouterr()
    train(blocks_for(output, **OPTIONS, resume_from_checkpoint="auto"))
    told = capsys.readouterr()
    (line,) = (line for line in told.err.splitlines() if "is passed over" in line)
    assert re.match(f"checkpoint-4 is passed over: {reason}", line)
    assert f"going on from {output / 'checkpoint-2'}\n" in told.out
    for folder in ("", "checkpoint-4"):
        assert_same_blocks(bank_of(output / folder), bank_of(whole / folder))


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
    assert train(blocks_for(**changes)).best_step == 4
    assert_same_blocks(bank_of(tmp_path / "out"), bank_of(tmp_path / "out" / "checkpoint-4"))


def test_a_run_of_blocks_is_replaced_where_that_is_asked(blocks_for, tmp_path):
    train(blocks_for(save_steps=3))
    train(blocks_for(max_steps=2, overwrite_output_dir=True))
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    (tmp_path / "out" / "memory_bank" / "hier-ffn" / "notes.txt").write_text("mine")
    with refused(r"which also holds what no run of ours wrote: memory_bank/hier-ffn/notes\.txt"):
        train(blocks_for(max_steps=2, overwrite_output_dir=True))
