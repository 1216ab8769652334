"""Banks of tiny models, filled, and `midus bank` run on them."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.cli import bank, edit


def bank_of(folder: Path, writable: bool = False) -> MemoryBank:
    """The bank of the only memory of a model."""
    layout = AutoModelForCausalLM.from_pretrained(folder).banks.layouts["hier-ffn"]
    return MemoryBank(folder / "memory_bank" / "hier-ffn", layout, writable=writable)


def write_blocks(folder: Path, nodes: Iterable[tuple[int, int]], seed: int = 0) -> None:
    """Write blocks of a level and a record each."""
    bank, generator = bank_of(folder, writable=True), torch.Generator().manual_seed(seed)
    for level, index in nodes:
        bank.write(level, index, torch.randn(bank.layout.record_numel(level), generator=generator))
    bank.close()


def command_of(words: Sequence[Any]) -> Callable[[list[str]], int]:
    """Return the command that has what the first word names."""
    return edit.main if words[0] in ("delete", "export", "import") else bank.main


def run(*words, capsys) -> dict:
    """What the command prints as JSON."""
    capsys.readouterr()
    assert command_of(words)([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(*words, capsys) -> str:
    """The one line that it ends with where a request is wrong."""
    assert command_of(words)([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
