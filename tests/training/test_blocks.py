"""Blocks that texts fetch are trained by a Trainer: those that were fetched, alike in all processes, and exactly again."""

import json
from pathlib import Path

import pytest
import torch
from pairs import by_default
from peft import LoraConfig, get_peft_model
from processes.warm import MIDUS, run_ranks
from tiny import save_tiny_model
from training.outcomes import assert_resumes, assert_same_blocks, bank_of, logged, moved
from training.tiny_run import (
    FETCHING,
    LEAVES,
    QUIET,
    PreparedRun,
    best_at,
    document,
    give_held_out_losses,
    refused,
    write_recipe,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from midus_hf.memories.hierarchical.training import draw_generic, train_blocks
from midus_hf.training import MemoryTrainer, set_trainable
from midus_hf.training.run import run_training
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
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES) and not fresh.written(1)
    assert torch.equal(bank.block(2, 3), fresh.block(2, 3)) and not torch.equal(bank.block(2, 4), fresh.block(2, 4))


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
    assert draw_generic(3, 0, 9, 1.0).all() and not draw_generic(3, 0, 9, 0.0).any()


def test_resume_with_accumulation_matches_full_run(blocks_for, tmp_path, capsys):
    halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    parts = assert_resumes(blocks_for, 3, generic_share=0.5, **halves)
    bank, fetched = 3 * 32 * 4 * (4 * 3 + 2 * 9), 3 * 32 * 4 * (4 + 2)
    assert " ".join(capsys.readouterr().out.split()).count(f"{fetched:,} of its {bank:,} parameters by each text") == 2
    assert logged(parts, "trained_parameters") == [bank]
    assert_same_blocks(bank_of(tmp_path / "whole"), bank_of(parts))
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert not (checkpoint / "memory_bank").exists() and not list(checkpoint.glob("model*.safetensors"))
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
    assert len(losses) == 2 and losses[0] != losses[1]
    assert len(others) == 2 and others[0] == others[1], "the model is frozen"
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
    assert len(ours["loss"]) == 12 and theirs["loss"][-1] != pytest.approx(theirs["loss"][0], rel=1e-3)
    assert ours["learning_rate"] == theirs["learning_rate"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
