"""Checkpoints of runs that train blocks: what is resumed, chosen, removed and replaced includes the blocks."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from training.block_runs import assert_same_blocks, bank_of, config_of
from training.outcomes import as_it_was_at, flip
from training.tiny_run import best_at, document, give_held_out_losses, refused, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.banks.level_file import LevelFile
from midus_hf.files import manifest
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.output.run_checkpoints import damage_of, finish_checkpoint
from midus_hf.training.run.train import train
from midus_hf.training.trainer.memory_trainer import MemoryTrainer

OPTIONS = {"save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(models, assigned, tmp_path_factory) -> Path:
    """Return the output of a run with all of its checkpoints, which nobody may change."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(config_of(models / "hier-ffn", assigned, output, **OPTIONS))
    return output


# The file of which a byte is flipped, which byte, and what is said of it.
DAMAGES = {
    "the state of a block": (
        "block_states/0/level-1-2.safetensors",
        -1,
        r"block \d+ of bank file .* is not what was written",
    ),
    "the header of a state": ("block_states/0/level-1-2.safetensors", 9, r"bank file .* has no header of a bank"),
    "the list of states": ("block_states/0/touched.json", 0, r".*touched\.json does not name the files"),
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


def files_of_level(folders, level: int) -> list[int]:
    """Numbers of the files with a level, by folder: those of one number are one file."""
    return [(folder / "memory_bank" / "hier-ffn" / f"level-{level}.safetensors").stat().st_ino for folder in folders]


@pytest.fixture
def start(blocks_for, tmp_path) -> Path:
    """Make a model whose blocks have all that a bank can lack: some were never written."""
    train(blocks_for("start", max_steps=2))
    return tmp_path / "start"


def test_a_bank_that_does_not_train_is_written_once_and_linked_from_then_on(start, blocks_for, tmp_path, monkeypatch):
    """Its own files are one of the two copies that checkpoints link in turn, and no file of the trained model is a link."""
    output = tmp_path / "out"
    written, digested, write, sha256 = [], [], LevelFile.write, manifest.file_sha256
    monkeypatch.setattr(LevelFile, "write", lambda file, *record: written.append(file.path) or write(file, *record))
    monkeypatch.setattr(manifest, "file_sha256", lambda path: digested.append(path) or sha256(path))
    options = {"save_steps": 1, "save_total_limit": None, "trainable": [0], "max_steps": 5}
    train(blocks_for(model=start, **options))
    folders = [output / f"checkpoint-{step}" for step in range(1, 6)]
    for level in (1, 2):
        of_start, first, *rest, of_end = files_of_level([start, *folders, output], level)
        assert rest == [of_start, first, of_start, first] and len({of_start, first, of_end}) == 3
        assert sum(path.name == f"level-{level}.safetensors" for path in digested) == 2, "once for each copy"
    assert {path.parents[2] for path in written} == {folders[0], output / ".partial_model"}
    for folder in (*folders, output):
        assert_same_blocks(bank_of(folder), bank_of(start))
    assert all(damage_of(folder) is None for folder in folders)


def test_a_bank_that_is_trained_where_it_lies_changes_no_checkpoint_that_links_it(start, blocks_for, tmp_path):
    output = tmp_path / "out"
    options = {"save_steps": 1, "save_total_limit": 1, "trainable": [0], "max_steps": 1}
    train(blocks_for(model=start, **options))
    checkpoint = output / "checkpoint-1"
    assert files_of_level([checkpoint], 2) == files_of_level([start], 2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    set_trainable(model)
    (bank,) = model.banks.train().values()
    bank.block(2, 0).sum().backward()
    bank.step(lr=1e-1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    before = bank_of(start).block(2, 0).clone()
    model.banks.save(checkpoint)
    assert torch.equal(bank_of(start).block(2, 0), before) and not torch.equal(bank_of(checkpoint).block(2, 0), before)


def test_a_level_of_which_nothing_has_changed_is_linked_beside_one_that_has(start, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(start)
    set_trainable(model)
    (bank,) = model.banks.train().values()
    folders = [tmp_path / str(number) for number in range(4)]
    for number, folder in enumerate(folders):
        bank.block(1, 0).sum().backward()
        bank.step(lr=1e-1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
        with model.banks.linking(folders[:number], 2):
            model.save_pretrained(folder)
    for number in files_of_level([start, *folders], 1):
        assert files_of_level([start, *folders], 1).count(number) == 1
    of_start, first, *rest = files_of_level([start, *folders], 2)
    assert rest == [of_start, first, of_start] and of_start != first
    model.save_pretrained(tmp_path / "last")
    assert files_of_level([tmp_path / "last"], 2)[0] not in (of_start, first)
    assert_same_blocks(bank_of(tmp_path / "last"), bank_of(folders[-1]))


def test_a_script_of_ones_own_gets_the_blocks_of_the_best_step_as_well(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models / "hier-ffn")
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
    assert_same_blocks(bank_of(tmp_path / "saved"), bank_of(best))


def test_a_run_of_blocks_is_replaced_where_that_is_asked(blocks_for, tmp_path):
    train(blocks_for(save_steps=3))
    train(blocks_for(max_steps=2, overwrite_output_dir=True))
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    (tmp_path / "out" / "memory_bank" / "hier-ffn" / "notes.txt").write_text("mine")
    with refused(r"which also holds what no run of ours wrote: memory_bank/hier-ffn/notes\.txt"):
        train(blocks_for(max_steps=2, overwrite_output_dir=True))


def test_a_run_is_resumed_that_began_before_an_option_was_there(blocks_for, tmp_path):
    output = tmp_path / "out"
    train(blocks_for(output, save_steps=3))
    record = output / "train_config.yaml"
    options = yaml.safe_load(record.read_text())
    del options["audit"], options["corpus"]["id_column"]
    record.write_text(yaml.safe_dump(options))
    train(blocks_for(output, save_steps=3, resume_from_checkpoint=True))
