"""Blocks that texts fetch are trained by a Trainer: those that were fetched, alike in all processes, and exactly again."""

import json
from pathlib import Path

import pytest
import torch
from processes.warm import run_ranks
from safetensors.torch import load_file
from tiny import save_tiny_model
from training.tiny_run import document, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.training import MemoryTrainer, set_trainable, train
from midus_hf.training.run import prepare
from midus_hf.training.training_log import read_log
from upscalers import upscale
from upscalers.banks.editing import BankRequest
from upscalers.banks.merging import merge

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_cpt.py"
TYPES = ["hier-ffn", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn", "hier-kv"]
LEAVES = [0, 4, 5]
"""Those that the corpus has texts of, of nine."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny upscaled models by their method; nobody may change them."""
    folder = tmp_path_factory.mktemp("fetching")
    base = save_tiny_model("llama", folder / "base")
    for method in TYPES:
        upscale(
            base=base, method=method, output=folder / method, options={"sizes": [4, 2], "branching": 3}, verify=False
        )
        tiny_tokenizer().save_pretrained(folder / method)
    return folder


@pytest.fixture(scope="module")
def assigned(tmp_path_factory):
    """A corpus whose documents have paths."""
    path = tmp_path_factory.mktemp("assigned") / "corpus.jsonl"
    rows = [
        {"text": document(30, LEAVES[index % 3]), "memory_ids": [LEAVES[index % 3] // 3, LEAVES[index % 3]]}
        for index in range(18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(model, assigned, output, **changes):
    options = {"path_column": "memory_ids", "cache_dir": str(assigned.parent / "cache")}
    words = {"generic_share": 0.0, "max_steps": 6, "batch_size": 4, **changes}
    return tiny_config(model, assigned, output, corpus_options=options, **words)


def bank_of(folder: Path, method: str = "hier-ffn") -> MemoryBank:
    return AutoModelForCausalLM.from_pretrained(folder).banks.of(method)


def logged(folder: Path, name: str) -> list[float]:
    return [event[name] for event in read_log(folder / "log.jsonl") if name in event]


@pytest.mark.parametrize("method", TYPES)
def test_texts_are_learned_by_blocks_that_they_fetch_and_by_nothing_else(models, assigned, tmp_path, method):
    train(config_of(models / method, assigned, tmp_path / "out", max_steps=25))
    losses = logged(tmp_path / "out", "loss")
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.05
    before, after = load_file(models / method / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    bank, fresh = bank_of(tmp_path / "out", method), bank_of(models / method, method)
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES) and not fresh.written(1)
    assert torch.equal(bank.block(2, 3), fresh.block(2, 3)) and not torch.equal(bank.block(2, 4), fresh.block(2, 4))


def test_what_is_reported_trains(models, assigned, tmp_path, capsys):
    run = prepare(config_of(models / "hier-ffn", assigned, tmp_path / "out"))
    told = " ".join(capsys.readouterr().out.split())
    bank = 3 * 32 * 4 * (4 * 3 + 2 * 9)
    assert (
        f"Training the blocks of the bank alone, {bank:,} parameters, as texts fetch them; the model is frozen" in told
    )
    assert f"as fetched │ {bank:,}" in told
    assert "18 documents, 558 tokens, packed within 3 leaves" in told
    assert [bank.layout.bank for bank in run.trainer.trained_banks] == [bank]


def test_a_share_of_sequences_trains_the_generic_memory(models, assigned, tmp_path):
    train(config_of(models / "hier-ffn", assigned, tmp_path / "out", generic_share=0.5, max_steps=3))
    bank = bank_of(tmp_path / "out")
    assert 3 in bank.written(1) and 9 in bank.written(2)


def test_the_model_trains_as_well_where_everything_does(models, assigned, tmp_path):
    train(config_of(models / "hier-ffn", assigned, tmp_path / "out", trainable="all"))
    before = load_file(models / "hier-ffn" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert bank_of(tmp_path / "out").written(2) == LEAVES


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation": 2, "batch_size": 2}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(models, assigned, tmp_path, changes):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(models / "hier-ffn", assigned, whole, **changes))
    train(config_of(models / "hier-ffn", assigned, parts, save_every=3, **changes))
    for path in (parts / "checkpoint-6", parts / "model.safetensors"):
        path.rename(tmp_path / path.name)
    train(config_of(models / "hier-ffn", assigned, parts, save_every=3, resume=True, **changes))
    assert logged(parts, "loss") == logged(whole, "loss")
    one, other = bank_of(whole), bank_of(parts)
    for level in (1, 2):
        assert one.written(level) == other.written(level)
        assert all(torch.equal(one.block(level, index), other.block(level, index)) for index in one.written(level))


def test_a_checkpoint_is_a_model_with_what_was_trained_until_then(models, assigned, tmp_path):
    train(config_of(models / "hier-ffn", assigned, tmp_path / "out", save_every=3))
    early, late = bank_of(tmp_path / "out" / "checkpoint-3"), bank_of(tmp_path / "out")
    assert early.written(2) == late.written(2) == LEAVES
    assert not torch.equal(early.block(2, 0), late.block(2, 0))


def test_accumulated_gradients_are_those_of_one_batch(models, assigned, tmp_path):
    for name, changes in (("one", {"batch_size": 4}), ("two", {"batch_size": 2, "gradient_accumulation": 2})):
        train(config_of(models / "hier-ffn", assigned, tmp_path / name, **changes))
    assert logged(tmp_path / "two", "grad_norm") == pytest.approx(logged(tmp_path / "one", "grad_norm"), rel=1e-4)
    assert logged(tmp_path / "two", "loss") == pytest.approx(logged(tmp_path / "one", "loss"), rel=1e-5)


def test_gradients_of_blocks_are_clipped(models, assigned, tmp_path):
    for name, changes in (("free", {"max_grad_norm": 0}), ("clipped", {"max_grad_norm": 1e-3})):
        train(config_of(models / "hier-ffn", assigned, tmp_path / name, max_steps=2, **changes))
    norms = [logged(tmp_path / name, "grad_norm") for name in ("free", "clipped")]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-4) and norms[0][0] > 1e-2


def test_activation_checkpointing_changes_nothing(models, assigned, tmp_path):
    for name, aids in (("with", True), ("without", False)):
        changes = {"activation_checkpointing": aids, "max_steps": 3}
        train(config_of(models / "hier-ffn", assigned, tmp_path / name, **changes))
    assert logged(tmp_path / "with", "loss") == pytest.approx(logged(tmp_path / "without", "loss"), rel=1e-6)


def test_two_processes_agree_on_blocks_and_train_as_one(models, assigned, tmp_path):
    train(config_of(models / "hier-ffn", assigned, tmp_path / "one"))
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "two"
    recipe.write_text(
        f"corpus: {{path: {assigned}, path_column: memory_ids, cache_dir: {assigned.parent / 'cache'}}}\nlearning_rate: 1e-2\n"
    )
    words = {
        "model": models / "hier-ffn",
        "output": output,
        "sequence_length": 16,
        "batch_size": 2,
        "max_steps": 6,
        "precision": "fp32",
        "log_every": 1,
        "generic_share": 0,
        "save_every": 3,
    }
    run = run_ranks(SCRIPT, recipe, *(f"{name}={value}" for name, value in words.items()))
    assert run.returncode == 0, run.stderr
    assert logged(output, "loss") == pytest.approx(logged(tmp_path / "one", "loss"), rel=1e-5)
    one, two = bank_of(tmp_path / "one"), bank_of(output)
    for level in (1, 2):
        assert one.written(level) == two.written(level)
        for index in one.written(level):
            torch.testing.assert_close(two.block(level, index), one.block(level, index), rtol=1e-3, atol=1e-4)


def test_a_corpus_without_paths_is_refused_before_anything_is_written(models, corpus, tmp_path):
    with pytest.raises(
        ValueError, match=r"fetches blocks by the path of a text, and corpus\.path_column is not given"
    ):
        train(tiny_config(models / "hier-ffn", corpus, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_shares_out_of_range_are_refused(models, assigned, tmp_path, share):
    with pytest.raises(ValueError, match=f"generic_share is {share}; expected a share from 0 to 1"):
        config_of(models / "hier-ffn", assigned, tmp_path / "out", generic_share=share)


def test_float16_is_refused(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models / "hier-ffn")
    set_trainable(model)
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    arguments.fp16 = True
    with pytest.raises(
        ValueError, match="blocks of a memory bank train, which FSDP, DeepSpeed and fp16 do not know of"
    ):
        MemoryTrainer(model, arguments)


def test_runs_of_two_subtrees_put_together_are_the_run_of_both(models, tmp_path):
    """As long as a step has texts of one subtree alone: what other steps do touches no block of it."""
    texts = {leaf: [document(15, leaf + number) for number in range(8)] for leaf in (0, 4)}

    def corpus(name, leaves):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"text": text, "memory_ids": [leaf // 3, leaf]} for leaf in leaves for text in texts[leaf]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def run(name, leaves):
        config = config_of(models / "hier-ffn", corpus(name, leaves), tmp_path / name, max_steps=None, epochs=1)
        prepared = prepare(config)
        prepared.trainer.args.train_sampling_strategy = "sequential"
        prepared.execute()

    run("both", (0, 4))
    run("first", (0,))
    run("second", (4,))
    merge(BankRequest(models / "hier-ffn", tmp_path / "merged"), [tmp_path / "first", tmp_path / "second"])
    merged, both = bank_of(tmp_path / "merged"), bank_of(tmp_path / "both")
    for level, written in ((1, [0, 1]), (2, [0, 4])):
        assert merged.written(level) == both.written(level) == written
        assert all(torch.equal(merged.block(level, index), both.block(level, index)) for index in written)
