"""Checkpoints of a run share the files of what does not train, and load as any other does."""

import json
import os
from pathlib import Path

import pytest
import torch
from pairs import by_default
from safetensors.torch import load_file
from tiny import FAMILIES
from training.block_runs import assert_same_blocks, bank_of
from training.outcomes import exact_log, flip, weights
from training.steered_runs import END, SAVED, AtStep
from transformers import AutoModelForCausalLM

from midus_hf.training.output.run_checkpoints import damage_of
from midus_hf.training.run import checkpoints
from midus_hf.training.run.train import prepare, train

OPTIONS = {"max_steps": 8, "save_steps": 2, "save_total_limit": None}
FROZEN, INDEX = "frozen.safetensors", "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    """Tiny models have too little that is frozen."""
    monkeypatch.setattr(checkpoints, "_WORTH_A_FILE", 1)


def numbers(output: Path, name: str = FROZEN) -> list[int]:
    """Of the files in the checkpoints, by step: those of one number are one file."""
    folders = sorted(output.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    return [(folder / name).stat().st_ino for folder in folders]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_state(one: Path, other: Path) -> None:
    of_one, of_other = state_of(one), state_of(other)
    assert of_one.keys() == of_other.keys() and all(torch.equal(of_one[name], of_other[name]) for name in of_one)


@pytest.mark.parametrize("family", by_default(["llama", "qwen2"], FAMILIES))
def test_what_is_frozen_is_written_twice_and_linked_from_then_on(family, config_for, tmp_path, monkeypatch):
    output, plain = tmp_path / "out", tmp_path / "plain"
    train(config_for(output, family, **OPTIONS))
    two, four, six, eight = numbers(output)
    assert two == six and four == eight and two != four
    assert len(set(numbers(output, "trained.safetensors"))) == 4
    monkeypatch.setattr(checkpoints, "_WORTH_A_FILE", 2**40)
    train(config_for(plain, family, **OPTIONS))
    for step in (2, 8):
        shared, whole = (folder / f"checkpoint-{step}" for folder in (output, plain))
        assert damage_of(shared) is None and not (shared / "model.safetensors").exists()
        assert_same_state(shared, whole)
        saved = weights(whole)
        parts = {name: load_file(shared / name) for name in ("trained.safetensors", FROZEN)}
        index = json.loads((shared / INDEX).read_text())
        assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
        assert index["weight_map"].keys() == saved.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.values())
    assert exact_log(output) == exact_log(plain)


def test_a_run_goes_on_and_shares_what_it_was_resumed_from(config_for, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    train(config_for(whole, "qwen2", **OPTIONS))
    train(config_for(output, "qwen2", **OPTIONS))
    flip(output / "checkpoint-8" / FROZEN)  # which is that of checkpoint-4, too
    assert damage_of(output / "checkpoint-4") is not None and damage_of(output / "checkpoint-2") is None
    train(config_for(output, "qwen2", **OPTIONS, resume_from_checkpoint=True))
    assert exact_log(output) == exact_log(whole)
    assert_same_state(output / "checkpoint-8", whole / "checkpoint-8")
    for name in ("checkpoint-6", "checkpoint-8"):
        assert damage_of(output / name) is None
    assert len({*numbers(output)[2:]}) == 2, "of checkpoint 6, which it went on from, and of 8"


def test_of_one_checkpoint_that_is_kept_one_copy_is_written(config_for, tmp_path):
    seen, output = [], tmp_path / "out"
    run = prepare(config_for(output, **{**OPTIONS, "save_total_limit": 1}))
    run.trainer.add_callback(AtStep(None, lambda model: seen.extend(numbers(output)), SAVED))
    run.execute()
    assert len(seen) == 4 and len(set(seen)) == 1
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-8"]
    assert damage_of(output / "checkpoint-8") is None


@pytest.mark.parametrize("hindrance", ["no links", "gone", "cut", "header"])
def test_what_cannot_be_linked_is_written(hindrance, config_for, tmp_path, monkeypatch):
    output = tmp_path / "out"
    run = prepare(config_for(output, **OPTIONS))

    def hinder(model):
        for folder in output.glob("checkpoint-*"):
            if hindrance == "gone":
                (folder / FROZEN).unlink(missing_ok=True)
            elif hindrance == "cut":
                os.truncate(folder / FROZEN, 10)
            elif hindrance == "header":
                flip(folder / FROZEN, 12)

    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    for step in (2, 4, 6, 8):
        run.trainer.add_callback(AtStep(step, hinder, END))
    if hindrance == "no links":
        monkeypatch.setattr(os, "link", link)
    run.execute()
    assert damage_of(output / "checkpoint-8") is None
    assert hindrance != "no links" or len(set(numbers(output))) == 4


def test_frozen_weights_that_someone_changes_are_written_anew(config_for, tmp_path):
    """A write through `.data` leaves no trace on a tensor, so the tensors themselves are compared with the file."""
    output = tmp_path / "out"
    run = prepare(config_for(output, **OPTIONS))

    def change(model):
        next(weight for weight in model.parameters() if not weight.requires_grad).data[0, 0] += 1

    run.trainer.add_callback(AtStep(6, change, END))
    run.execute()
    two, four, six, eight = numbers(output)
    assert len({two, four, six, eight}) == 4
    assert_same_state(output / "checkpoint-8", output)


def test_a_run_that_trains_all_has_one_file_of_weights(config_for, tmp_path):
    train(config_for(max_steps=2, save_steps=2, trainable="all"))
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "checkpoint-2" / FROZEN).exists()


def test_a_run_of_blocks_alone_shares_the_whole_model(blocks_for, tmp_path):
    output = tmp_path / "out"
    train(blocks_for(output, save_steps=2, save_total_limit=None, trainable="new"))
    two, four, six = numbers(output)
    assert two == six != four
    assert_same_state(output / "checkpoint-6", output)
    assert_same_blocks(bank_of(output / "checkpoint-6"), bank_of(output))


def test_a_full_disk_leaves_nothing_of_either_part(config_for, tmp_path, monkeypatch):
    output, replace = tmp_path / "out", os.replace

    def full(source, target):
        if str(target) == str(output / "checkpoint-6" / "trained.safetensors"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    train(config_for(output, **OPTIONS))
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-8",
    ]
    assert all(damage_of(path) is None for path in output.glob("checkpoint-*"))
