"""What runs need that train blocks of a bank: a tiny model that fetches, texts that have paths, a look at what was trained."""

import json
from pathlib import Path

import torch
from training.tiny_run import document, tiny_config
from transformers import AutoModelForCausalLM

from midus_hf.banks.memory_bank import MemoryBank

# Those that the corpus has texts of, of nine.
LEAVES = [0, 4, 5]


def write_assigned(path: Path) -> Path:
    """Write a corpus whose documents have paths."""
    rows = [
        {"text": document(30, LEAVES[index % 3]), "memory_ids": [LEAVES[index % 3] // 3, LEAVES[index % 3]]}
        for index in range(18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(model, assigned, output, **changes):
    words = {"generic_share": 0.0, "max_steps": 6, "per_device_train_batch_size": 4, **changes}
    return tiny_config(model, assigned, output, path_column="memory_ids", **words)


def bank_of(folder: Path, method: str = "hier-ffn") -> MemoryBank:
    return AutoModelForCausalLM.from_pretrained(folder).banks.bank(method)


def assert_same_blocks(one: MemoryBank, other: MemoryBank) -> None:
    for level in one.layout.levels:
        assert one.written(level) == other.written(level)
        assert all(torch.equal(one.block(level, index), other.block(level, index)) for index in one.written(level))
