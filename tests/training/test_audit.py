"""What trains a block is recorded: every document of a sequence that fetched it, as often as that was, and exactly again."""

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from training.block_runs import AUDIT, LEAVES, bank_of, recorded
from training.outcomes import assert_resumes
from training.tiny_run import document, refused

from midus_hf.banks.audit import BankAudit
from midus_hf.training.options import TrainConfig, WeightedCorpus
from midus_hf.training.run.train import prepare, train


def words_of(line: int) -> int:
    """Tokens of a document of the corpus `numbered`: its words, and the end of the text."""
    return 20 + line + 1


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Path:
    """Documents of different lengths, of which no two have one; there are empty lines and texts between them."""
    path, lines = tmp_path_factory.mktemp("numbered") / "corpus.jsonl", []
    for line in range(1, 16):
        leaf = LEAVES[line % 3]
        row = {"text": document(20 + line, line), "memory_ids": [leaf // 3, leaf], "id": f"d{line}"}
        lines.append("" if line == 4 else json.dumps(row | {"text": " "} if line == 7 else row))
    path.write_text("\n".join(lines) + "\n")
    return path


READ = [line for line in range(1, 16) if line not in (4, 7)]


@pytest.fixture
def audited(blocks_for, numbered):
    """Return what gives the options of a run over all documents that is recorded, by the name of its output."""

    def config(output: str = "out", **changes) -> TrainConfig:
        return blocks_for(output, **{"corpus": numbered, "audit": True, "max_steps": None, **changes})

    return config


def test_every_token_of_a_document_trains_the_blocks_of_its_path_once_an_epoch(audited, tmp_path):
    epochs = 2
    train(audited(num_train_epochs=epochs))
    found = recorded(tmp_path / "out")
    expected = {(1, LEAVES[line % 3] // 3, line) for line in READ} | {(2, LEAVES[line % 3], line) for line in READ}
    assert found.keys() == expected
    assert {key: tokens for key, (_, tokens) in found.items()} == {key: epochs * words_of(key[2]) for key in expected}
    # A document lies in as many sequences of 16 tokens as it reaches into.
    for leaf in LEAVES:
        place = 0
        for line in (line for line in READ if LEAVES[line % 3] == leaf):
            begin, place = place, place + words_of(line)
            assert found[2, leaf, line][0] == epochs * ((place - 1) // 16 - begin // 16 + 1)


def test_documents_are_told_by_file_sum_line_and_name(audited, numbered, tmp_path):
    config = audited(num_train_epochs=1)
    config.corpus.id_column = "id"
    train(config)
    with BankAudit(tmp_path / "out" / AUDIT) as audit:
        found = {each.document for each in audit.trained()}
    digest = hashlib.blake2b(numbered.read_bytes()).hexdigest()
    assert {(each.file, each.digest) for each in found} == {("corpus.jsonl", digest)}
    assert sorted((each.line, each.name) for each in found) == [(line, f"d{line}") for line in READ]


def test_what_reads_the_generic_memory_trains_it_and_no_other_block(audited, tmp_path):
    train(audited(num_train_epochs=1, generic_share=0.5))
    found, sums = recorded(tmp_path / "out"), Counter()
    for (level, index, line), (_, tokens) in found.items():
        assert level == 2 or index in (0, 1, 3)
        sums[level, line] += tokens
    assert {index for level, index, _ in found if level == 2} == {*LEAVES, 9}
    assert sums == {(level, line): words_of(line) for level in (1, 2) for line in READ}
    assert {key[:2] for key in found} == {
        (level, index) for level in (1, 2) for index in bank_of(tmp_path / "out").written(level)
    }


def test_recording_changes_nothing_that_is_trained_and_passes_of_a_step_count_together(audited, tmp_path):
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    train(audited(num_train_epochs=1, **changes))
    train(audited("off", audit=False, num_train_epochs=1, **changes))
    one, other = bank_of(tmp_path / "out"), bank_of(tmp_path / "off")
    for level in (1, 2):
        assert all(torch.equal(one.block(level, index), other.block(level, index)) for index in one.written(level))
    assert sum(tokens for (level, *_), (_, tokens) in recorded(tmp_path / "out").items() if level == 2) == sum(
        map(words_of, READ)
    )
    assert not (tmp_path / "off" / AUDIT).exists()


def test_a_resumed_run_records_everything_once(audited, tmp_path):
    parts = assert_resumes(audited, 4, num_train_epochs=2)
    assert recorded(parts) == recorded(tmp_path / "whole")
    early, late = (
        sum(tokens for _, tokens in recorded(folder).values()) for folder in (parts / "checkpoint-4", parts)
    )
    assert 0 < early < late


def test_a_run_goes_on_with_the_record_of_its_model(audited, numbered, tmp_path):
    train(audited("one", num_train_epochs=1))
    changed = tmp_path / "corpus.jsonl"  # of the same name, with other lines
    changed.write_text(numbered.read_text().splitlines()[0] + "\n")
    for name, corpus in (("same", numbered), ("other", changed)):
        train(audited(name, corpus=corpus, model=tmp_path / "one", num_train_epochs=1))
    once, twice = recorded(tmp_path / "one"), recorded(tmp_path / "same")
    assert twice == {key: (2 * sequences, 2 * tokens) for key, (sequences, tokens) in once.items()}
    with BankAudit(tmp_path / "other" / AUDIT) as audit:
        first = [each for each in audit.trained([(2, 4)]) if each.document.line == 1]
    assert len(first) == 2 and len({each.document.digest for each in first}) == 2
    assert [each.tokens for each in first] == [words_of(1)] * 2


def test_what_was_trained_before_without_a_record_is_told(audited, tmp_path):
    train(audited("one", audit=False, max_steps=1, per_device_train_batch_size=1))
    before = bank_of(tmp_path / "one")
    train(audited("two", model=tmp_path / "one", max_steps=2))
    with BankAudit(tmp_path / "two" / AUDIT) as audit:
        assert audit.unrecorded() == {(level, index) for level in (1, 2) for index in before.written(level)}


def test_a_run_without_a_record_leaves_that_of_its_model_behind(audited, tmp_path):
    train(audited("one", num_train_epochs=1))
    train(audited("two", model=tmp_path / "one", audit=False, max_steps=1))
    assert not (tmp_path / "two" / AUDIT).exists() and (tmp_path / "one" / AUDIT).exists()


def test_documents_of_several_corpora_are_told_apart(audited, numbered, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(line + "\n" for line in numbered.read_text().splitlines()[:3]))
    options = {"path_column": "memory_ids", "cache_dir": str(tmp_path / "cache"), "weight": 1.0}
    corpora = [WeightedCorpus(path=str(path), **options) for path in (numbered, other)]
    train(dataclasses.replace(audited(max_steps=12), corpus=corpora))
    with BankAudit(tmp_path / "out" / AUDIT) as audit:
        lines = {(each.document.file, each.document.line) for each in audit.trained()}
    assert {file for file, _ in lines} == {"corpus.jsonl", "other.jsonl"}
    assert {line for file, line in lines if file == "other.jsonl"} == {1, 2, 3}


def test_a_run_that_trains_no_blocks_has_nothing_to_record(audited):
    with refused("audit is true, and no blocks of a memory bank train; expected a model"):
        prepare(audited(trainable=[0]))
