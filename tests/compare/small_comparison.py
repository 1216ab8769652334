"""A comparison that takes seconds: a tiny model of bytes, texts of four words, and runs that are done in this process."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluation.byte_models import save_byte_model

from midus_hf.compare.plan import Comparison, Run, list_searches, plan
from midus_hf.compare.run import Result, find_stages, input_hasher, main, read_result
from midus_hf.config.yaml_options import from_mapping

WORDS = ("alpha", "beta", "gamma", "delta")
HEADWISE = {"method": "midus-hml", "num_new_layers": 2, "options": {"n": 4, "k": 2}}
STEPS = 4


def write_room(folder: Path) -> Path:
    """Write a base, a corpus, two texts of its words and one of others."""
    save_byte_model("llama", folder / "base", max_position_embeddings=64)
    choice = random.Random(0)
    (folder / "corpus").mkdir()
    for name, length in (("corpus/1.txt", 120), ("corpus/2.txt", 120), ("plants.txt", 30), ("herbs.txt", 30)):
        (folder / name).write_text(" ".join(choice.choice(WORDS) for _ in range(length)))
    (folder / "stars.txt").write_text("Stars are far away. " * 8)
    return folder


def training(room: Path, **changes: Any) -> dict[str, Any]:
    """Keys of runs of a few steps, with measurements at the start, in the middle and at the end."""
    run = {"max_steps": STEPS, "sequence_length": 32, "per_device_train_batch_size": 2, "logging_steps": 1}
    return {"corpus": str(room / "corpus"), "learning_rate": 1e-2, "bf16": False, **run, **changes}


def keys(room: Path, output: Path, variants: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what a file would say of a comparison of one seed."""
    train = training(room, **changes.pop("train", {}))
    texts = {"domain": "plants", "retention": "stars", "validation": "herbs"}
    texts = {kind: {name: str(room / f"{name}.txt")} for kind, name in texts.items()}
    if changes.get("domain", True):
        train.setdefault("eval_steps", train["max_steps"] // 2 or 1)
    arguments = {"base": str(room / "base"), "output_dir": str(output), "variants": variants, "train": train, **texts}
    return {**arguments, "seeds": [0], **changes}


class SmallComparison:
    """A comparison in a room of `write_room` whose runs are done in this process."""

    def __init__(self, room: Path, output: Path, variants: dict[str, Any], **changes: Any):
        self.comparison, self.variants = plan(from_mapping(Comparison, keys(room, output, variants, **changes)))
        self.digests_for = input_hasher(self.comparison)

    def runs(self) -> list[Run]:
        return [run for variant in self.variants for run in list_searches(variant, self.comparison)]

    def measure_base(self) -> Result:
        return self.measure(find_stages(self.comparison, [])[0][0])

    def measure(self, run: Run, keep: bool = False) -> Result:
        """Do a run from its beginning, and perhaps keep its models next to its result."""
        values = {"run": asdict(run), "comparison": asdict(self.comparison), "inputs": self.digests_for(run.variant)}
        with pytest.MonkeyPatch.context() as patch:
            if keep:
                patch.setattr("midus_hf.compare.run.shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
            main(json.dumps(values))
        result = read_result(self.folder(run))
        assert result is not None
        return result

    def folder(self, run: Run) -> Path:
        return run.folder(self.comparison)


def compare_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `midus compare` do its runs in this process until the test ends."""

    def run(words: list[str], *, input: str, **_: Any) -> SimpleNamespace:
        main(input)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("midus_hf.compare.run.subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr("midus_hf.compare.run.code_version", str)  # which asks git in a process
