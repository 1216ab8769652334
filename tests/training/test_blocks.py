"""Blocks that texts fetch are trained where they were fetched, alike in all processes; a bank knows its layers, base and tree."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from pairs import by_default
from peft import LoraConfig, get_peft_model
from processes.warm import MIDUS, run_ranks
from tiny import save_tiny_model
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree
from training.outcomes import assert_resumes, assert_same_blocks, bank_of, logged, moved
from training.tiny_run import (
    FETCHING,
    LEAVES,
    QUIET,
    PreparedRun,
    best_at,
    block_config,
    document,
    give_held_out_losses,
    refused,
    tiny_tokenizer,
    write_recipe,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from midus_hf.cli.evaluate import main as midus_eval
from midus_hf.evaluation.fetching import check_tree_of
from midus_hf.memories.hierarchical.training import draw_generic, train_blocks
from midus_hf.topics.tree import ClusterTree, TreeOrigin
from midus_hf.training import MemoryTrainer, set_trainable
from midus_hf.training.run import run_training
from upscalers.edits.banks import delete
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# Projections of a layer by the name of the pair of factors that adapts them.
PROJECTIONS = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output_projection": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
}


@pytest.mark.parametrize("method", by_default(["hier-ffn", "hier-lora-qk"], FETCHING))
def test_only_fetched_blocks_learn(blocks_for, upscaled, tmp_path, method):
    source = upscaled("llama", method)
    run_training(blocks_for(model=source, max_steps=25))
    losses = logged(tmp_path / "out")
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.05
    assert moved(source, tmp_path / "out") == set()
    bank, fresh = bank_of(tmp_path / "out", method), bank_of(source, method)
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES)
    assert not fresh.written(1)
    assert torch.equal(bank.block(2, 3), fresh.block(2, 3))
    assert not torch.equal(bank.block(2, 4), fresh.block(2, 4))


def test_a_new_model_begins_with_blocks_of_its_own(fetching, blocks_for, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    begun = {"model_name_or_path": None, "config_name": str(fetching), "tokenizer_name": str(tmp_path / "tokenizer")}
    parts = assert_resumes(partial(blocks_for, **begun), 2, max_steps=4)
    bank = bank_of(parts)
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES)
    assert_same_blocks(bank_of(tmp_path / "whole"), bank)
    unwritten = bank.block(2, 3)
    run_training(blocks_for("other", seed=2, max_steps=1, **begun))
    assert not torch.equal(bank_of(tmp_path / "other").block(2, 3), unwritten)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "other").banks.bank("hier-ffn")


def test_blocks_of_the_base_stay_where_another_memory_trains(fetching, blocks_for, tmp_path):
    upscale(base=fetching, method="midus-hml", output=tmp_path / "deeper", options={"n": 4, "k": 2})
    run_training(blocks_for(model=tmp_path / "deeper"))
    assert moved(tmp_path / "deeper", tmp_path / "out")
    assert_same_blocks(bank_of(tmp_path / "out"), bank_of(fetching))


def test_other_sequences_fetch_the_generic_memory_in_each_epoch(blocks_for):
    run, seen = PreparedRun(blocks_for(generic_share=0.5, num_train_epochs=4, max_steps=-1)), []

    def look(module, args, kwargs):
        generic = (kwargs["memory_ids"] == -1).all(1).tolist()
        seen.extend(zip(map(tuple, kwargs["input_ids"].tolist()), generic, strict=True))

    run.trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    run.execute()
    epochs = [sorted(seen[start : start + len(seen) // 4]) for start in range(0, len(seen), len(seen) // 4)]
    assert len({tuple(tokens for tokens, _ in epoch) for epoch in epochs}) == 1, "each epoch reads the same sequences"
    assert len({tuple(generic for _, generic in epoch) for epoch in epochs}) == 4


def test_generic_memory_is_drawn_by_place_in_the_run():
    drawn = draw_generic(3, 0, 20_000, 1 / 17)
    assert drawn.float().mean().item() == pytest.approx(1 / 17, abs=0.006)  # 3.6 standard deviations
    assert torch.equal(draw_generic(3, 700, 50, 1 / 17), drawn[700:750])
    assert not torch.equal(draw_generic(4, 0, 20_000, 1 / 17), drawn)
    assert draw_generic(3, 0, 9, 1.0).all()
    assert not draw_generic(3, 0, 9, 0.0).any()


def test_resume_with_accumulation_matches_full_run(blocks_for, tmp_path, capsys):
    halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    parts = assert_resumes(blocks_for, 3, generic_share=0.5, **halves)
    bank, fetched = 3 * 32 * 4 * (4 * 3 + 2 * 9), 3 * 32 * 4 * (4 + 2)
    assert " ".join(capsys.readouterr().out.split()).count(f"{fetched:,} of its {bank:,} parameters by each text") == 2
    assert logged(parts, "trained_parameters") == [bank]
    assert_same_blocks(bank_of(tmp_path / "whole"), bank_of(parts))
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert not (checkpoint / "memory_bank").exists()
    assert not list(checkpoint.glob("model*.safetensors"))
    names = sorted(path.name for path in checkpoint.glob("block_states/0/*"))
    assert names == ["level-1.safetensors", "level-2.safetensors"]
    run_training(blocks_for("one", generic_share=0.5))
    for name, tolerance in (("grad_norm", 1e-4), ("loss", 1e-5)):
        assert logged(tmp_path / "one", name) == pytest.approx(logged(parts, name), rel=tolerance)


def test_best_model_comes_with_its_blocks(blocks_for, tmp_path, monkeypatch):
    give_held_out_losses(monkeypatch, best_at(4))
    texts = held_out_rows(tmp_path / "held_out.jsonl", [0] * 3)
    best = {"save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    run_training(blocks_for(eval_text=str(texts), eval_steps=2, **best))
    monkeypatch.undo()
    run_training(blocks_for("four", max_steps=4, lr_scheduler_type="constant"))
    assert_same_blocks(bank_of(tmp_path / "out"), bank_of(tmp_path / "four"))


def test_two_processes_agree_on_blocks_and_train_as_one(blocks_for, fetching, assigned, tmp_path):
    run_training(blocks_for("one", generic_share=0.4))
    output = tmp_path / "two"
    words = {"generic_share": 0.4, "save_steps": 3, "path_column": "memory_ids", "output_dir": output}
    run = run_ranks(MIDUS, "train", write_recipe(tmp_path, fetching, assigned, **words))
    assert run.returncode == 0, run.stderr
    assert logged(output, "loss") == pytest.approx(logged(tmp_path / "one", "loss"), rel=1e-5)
    assert_same_blocks(bank_of(tmp_path / "one"), bank_of(output), rtol=1e-3, atol=1e-4)


def held_out_rows(path: Path, leaves) -> Path:
    paths = [{} if leaf is None else {"memory_ids": [leaf // 3, leaf]} for leaf in leaves]
    rows = [{"text": document(20, number), **path} for number, path in enumerate(paths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_held_out_text_fetches_its_blocks_and_trains_nothing(blocks_for, tmp_path):
    held_out = {"paths": [4, 0, 8, 7], "none": [None] * 20}  # of leaves 7 and 8 the corpus has nothing
    texts = {name: str(held_out_rows(tmp_path / f"{name}.jsonl", leaves)) for name, leaves in held_out.items()}
    run_training(blocks_for("without"))
    run_training(blocks_for("with", eval_text=texts, eval_steps=3))
    losses, others = (logged(tmp_path / "with", f"eval_{name}_loss") for name in texts)
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert len(others) == 2
    assert others[0] == others[1], "the model is frozen"
    assert logged(tmp_path / "with", "loss") == logged(tmp_path / "without", "loss")
    assert_same_blocks(bank_of(tmp_path / "with"), bank_of(tmp_path / "without"))


def test_held_out_text_of_another_tree_is_refused(blocks_for, tmp_path):
    texts = held_out_rows(tmp_path / "held_out.jsonl", [4, 9])
    with refused("has 3 for level 1 in row 1; expected"):
        run_training(blocks_for(eval_text=str(texts)))
    assert not (tmp_path / "out").exists()


def test_single_lora_blocks_train_as_peft(tmp_path):
    """The same losses and norms in every step: three stacked memories of one block of rank r, and PEFT's LoRA with alpha 2 r."""
    rank = 5
    save_tiny_model("llama", tmp_path / "0")
    for number, method in enumerate(("hier-lora-ffn", "hier-lora-vo", "hier-lora-qk")):
        base, output = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        options = {"sizes": [rank], "branching": 2, "layers": "all"}
        upscale(base=base, method=method, output=output, options=options, verify=False)
    model, base = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("3", "0"))
    set_trainable(model, "new")
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    copied = 0
    for trained in train_blocks(model.banks).values() if model.banks.trainable else ():
        for level, fields in trained.layout.records.items():
            record = trained.bank.block(level, 0)
            parts = record.split([field.numel for field in fields])
            for field, part in zip(fields, parts, strict=True):
                role, _, factor = field.name.rpartition("_")
                layer = adapted.get_submodule(f"base_model.model.model.layers.{field.layer}.{PROJECTIONS[role]}")
                weight = (layer.lora_A if factor == "down" else layer.lora_B)["default"].weight
                weight.data.copy_(part.view(field.tensor.shape))
                copied += 1
    assert copied == sum("lora_" in name for name, _ in adapted.named_parameters())
    torch.manual_seed(0)
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(3, 128, (24, 16))]
    options = {**QUIET, "max_steps": 12, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    options |= {"remove_unused_columns": False, "max_grad_norm": 1e-2}
    events = []
    for trainer_class, trained, data in (
        (MemoryTrainer, model, [{**row, "memory_ids": torch.tensor([0])} for row in rows]),
        (Trainer, adapted, rows),
    ):
        trainer = trainer_class(trained, TrainingArguments(str(tmp_path / "out"), **options), train_dataset=data)
        trainer.train()
        steps = [event for event in trainer.state.log_history if "loss" in event]
        events.append({name: [event[name] for event in steps] for name in ("loss", "grad_norm", "learning_rate")})
    ours, theirs = events
    assert len(ours["loss"]) == 12
    assert theirs["loss"][-1] != pytest.approx(theirs["loss"][0], rel=1e-3)
    assert ours["learning_rate"] == theirs["learning_rate"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


# Two trees of the shape that the models of these tests fetch blocks by.
TREE, OTHER = (random_tree(3, 2, width=WIDTH, seed=seed) for seed in (0, 1))


def named(assigned, path, tree):
    rows = [json.loads(line) for line in assigned.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "memory_tree": tree.fingerprint}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(fetching, assigned, tmp_path_factory):
    """Both trees, a smaller one, a corpus assigned by each, and a model trained with the first."""
    folder = tmp_path_factory.mktemp("trees")
    for name, tree in (("tree", TREE), ("other", OTHER)):
        tree.save(folder / name)
        named(assigned, folder / f"{name}.jsonl", tree)
    random_tree(2, 2, width=WIDTH).save(folder / "small")
    keys = {"tree": str(folder / "tree"), "save_steps": 3, "max_steps": 3}
    run_training(block_config(fetching, folder / "tree.jsonl", folder / "model", **keys))
    return folder


def fingerprints(folder) -> tuple[str | None, str | None]:
    bank = folder / "memory_bank" / "hier-ffn"
    beside = ClusterTree.load(bank).fingerprint if (bank / "tree.json").exists() else None
    return json.loads((bank / "bank.json").read_text())["tree"], beside


def test_tree_of_a_run_is_saved_and_moves_with_the_bank(made, fetching, tmp_path):
    assert fingerprints(fetching) == (None, None), "nothing trained this bank"
    both = (TREE.fingerprint, TREE.fingerprint)
    assert fingerprints(made / "model") == both
    AutoModelForCausalLM.from_pretrained(made / "model").save_pretrained(tmp_path / "saved")
    delete(EditRequest(made / "model", tmp_path / "deleted"), ["2:4"])
    upscale(base=made / "model", method="llama-pro", output=tmp_path / "deeper", num_new_layers=2, verify=False)
    strip(tmp_path / "deeper", tmp_path / "stripped")
    for name in ("saved", "deeper", "stripped"):
        assert fingerprints(tmp_path / name) == both, name
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).banks.bank("hier-ffn").tree == TREE.fingerprint
    before, after = bank_of(made / "model"), bank_of(tmp_path / "deeper")
    assert before.layout.layers != after.layout.layers
    assert before.layout.base is not None
    assert after.description["layout"]["layers"] == list(after.layout.layers)
    assert after.description["layout"]["base"] == after.layout.base
    assert all(torch.equal(before.block(2, index), after.block(2, index)) for index in before.written(2))
    own, beside = fingerprints(tmp_path / "deleted")  # of a tree without the deleted topic
    assert own == beside != TREE.fingerprint
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "deleted").banks.bank("hier-ffn").tree == own


def test_tree_may_be_named_by_its_model(blocks_for, made, tmp_path):
    config = blocks_for(model=made / "model", corpus=made / "tree.jsonl", tree=str(made / "model"), max_steps=1)
    assert ("tree", str(made / "model")) in config.sources(), "overwriting must not take it away"
    run_training(config)
    assert fingerprints(tmp_path / "out") == (TREE.fingerprint, TREE.fingerprint)
    assert all((made / "tree" / name).stat().st_nlink == 1 for name in ("tree.json", "tree.safetensors"))


OF_ANOTHER_TREE = (
    rf"fingerprint {OTHER.fingerprint[:16]}.*, and the model's bank was trained with {TREE.fingerprint[:16]}"
)


@pytest.mark.parametrize(
    ("model", "corpus", "keys", "message"),
    [
        *(("model", "other.jsonl", keys, OF_ANOTHER_TREE) for keys in ({}, {"trainable": "all"}, {"tree": "other"})),
        (None, "tree.jsonl", {"tree": "other"}, rf"corpus belongs to the tree .* {TREE.fingerprint[:16]}.*, and tree .*other"),
        (None, "tree.jsonl", {"tree": "small"}, "expected one tree"),
        (None, None, {"tree": "small"}, "has 2 levels of 2, and memory 'hier-ffn' fetches blocks by a tree of 2 levels of 3"),
    ],
)  # fmt: skip
def test_texts_and_trees_of_another_tree_are_refused(
    model, corpus, keys, message, blocks_for, made, assigned, fetching, tmp_path
):
    keys = {**keys, "tree": str(made / keys["tree"])} if "tree" in keys else keys
    paths = {"model": made / model if model else fetching, "corpus": made / corpus if corpus else assigned}
    with refused(message):
        PreparedRun(blocks_for(**paths, **keys))
    assert not (tmp_path / "out").exists()


def test_changed_tree_or_bank_is_not_resumed_over(blocks_for, assigned, made, fetching, tmp_path):
    TREE.save(tmp_path / "tree")
    shutil.copytree(fetching, tmp_path / "model")
    keys = {"model": tmp_path / "model", "tree": str(tmp_path / "tree"), "save_steps": 1}
    run_training(blocks_for(max_steps=1, **keys))
    keys |= {"resume_from_checkpoint": True, "max_steps": 1}
    shutil.rmtree(tmp_path / "tree")
    OTHER.save(tmp_path / "tree")
    with refused(r"tree is '.*tree', whose nodes are not those .*\(SHA-256 .*\); put them back"):
        PreparedRun(blocks_for(**keys))
    shutil.rmtree(tmp_path / "tree")
    TREE.save(tmp_path / "tree")
    bank = tmp_path / "model" / "memory_bank" / "hier-ffn" / "bank.json"
    bank.write_text(json.dumps({**json.loads(bank.read_text()), "seed": 77}))
    with refused(r"model_name_or_path is '.*model', whose files beside the weights \(fetched\) are not those"):
        PreparedRun(blocks_for(**keys))


def test_measuring_and_asking_refuse_another_tree(made, tmp_path, capsys):
    origin = TreeOrigin(embedding_model=str(save_tiny_bert(tmp_path / "bert")))
    ClusterTree(OTHER.branching, OTHER.centroids, origin).save(tmp_path / "retriever")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    with refused(f"the retriever is of .* {OF_ANOTHER_TREE}"):
        check_tree_of(model, OTHER)
    text = ["--text", str(made / "other.jsonl"), "--sequence-length", "16"]
    for paths in (["--retriever", str(tmp_path / "retriever")], ["--path-column", "memory_ids"]):
        assert midus_eval([str(made / "model"), *text, *paths]) == 2
        assert re.search(OF_ANOTHER_TREE, capsys.readouterr().err)
