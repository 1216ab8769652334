"""Recipes of papers' settings are comparisons: every row is planned on its base, and a file behind them makes them small."""

import dataclasses
from pathlib import Path

import pytest
from compare.small_comparison import write_room
from evaluation.byte_models import byte_tokenizer

from midus_hf.compare.options import Comparison
from midus_hf.compare.runs import check
from midus_hf.compare.variants import plan
from midus_hf.config.yaml_options import read_config
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config

FOLDER = Path(__file__).parents[2] / "configs" / "reproduce"
TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "small")
assert TABLES
LLAMAS = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}


def read(table: str, *settings: str, small: bool = False) -> Comparison:
    names = [table, *(["small"] if small else [])]
    return read_config(Comparison, [FOLDER / f"{name}.yaml" for name in names], settings)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_table_is_planned_on_its_base(table, tmp_path, monkeypatch):
    is_mathpile = table.startswith("midus-5")
    arguments = read(table, "train.corpus=corpus") if is_mathpile else read(table)
    folder = write_config(tmp_path / "base", LLAMAS[arguments.base])
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    planned, variants = plan(dataclasses.replace(arguments, base=str(folder), output_dir=str(tmp_path / "out")))
    check(planned, variants)
    assert (planned.seeds, planned.controls, planned.domain) == ([0], False, {}) and planned.tasks is not None
    for variant in variants:
        assert variant.train["per_device_train_batch_size"] * variant.train["gradient_accumulation_steps"] == 64
        assert variant.train["max_steps"] == (8392 if is_mathpile else 11444)
        assert "bf16" not in variant.train, "the default follows the device"
        assert variant.train.get("trainable") == ("all" if variant.name == "Base" else None)


def test_a_table_is_planned_small_by_a_file_behind_it(tmp_path, monkeypatch):
    room = write_room(tmp_path)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    words = [f"base={room / 'base'}", f"train.corpus={room / 'corpus'}", "train.sequence_length=64"]
    words += [f"domain.articles={room / 'stars.txt'}", "tasks.data=questions"]
    arguments = read("midus-1", *words, small=True)
    few = {
        name: arguments.variants[name] for name in ("LESA", "MIDUS-HML")
    }  # others need more layers than the base has
    planned, variants = plan(dataclasses.replace(arguments, variants=few))
    check(planned, variants)
    assert [variant.name for variant in variants] == ["LESA", "MIDUS-HML"]
    assert {variant.train["max_steps"] for variant in variants} == {50}
    assert planned.texts == {"articles": str(room / "stars.txt")} and "piqa" in planned.tasks.names
