"""Tables of papers are comparisons: every row is planned on its base, and numbers are put beside the paper's."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from compare.made_results import BASE, comparison, result
from compare.small_comparison import write_room
from evaluation.byte_models import byte_tokenizer

from midus_hf.compare.findings import findings
from midus_hf.compare.options import Comparison, PaperOptions, TaskOptions
from midus_hf.compare.report import as_json, paper_number, paper_tables, tables, write_report
from midus_hf.compare.results import Measured, Point, Result
from midus_hf.compare.runs import check
from midus_hf.compare.variants import plan
from midus_hf.config.yaml_options import read_config
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config

FOLDER = Path(__file__).parents[2] / "configs" / "reproduce"
# Tables, by the files that make them.
TABLES = {
    "1": ["midus-1"],
    "2": ["midus-2"],
    "5-1b": ["midus-5-1b"],
    "5-8b": ["midus-5-8b"],
    "6": ["midus-1", "midus-6"],
    "ablations": ["midus-ablations"],
}
LLAMAS = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}


def read(table: str, *settings: str, small: bool = False) -> Comparison:
    names = [*TABLES[table], *(["small"] if small else [])]
    return read_config(Comparison, [FOLDER / f"{name}.yaml" for name in names], settings)


def test_every_file_belongs_to_a_table():
    named = {name for names in TABLES.values() for name in names}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == named | {"small"}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_table_is_planned_on_its_base(table, tmp_path, monkeypatch):
    arguments = read(table, "train.corpus=corpus") if table.startswith("5") else read(table)
    folder = write_config(tmp_path / "base", LLAMAS[arguments.base])
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    planned, variants = plan(dataclasses.replace(arguments, base=str(folder), output_dir=str(tmp_path / "out")))
    check(planned, variants)
    assert (planned.seeds, planned.controls, planned.domain) == ([0], False, {})
    assert planned.paper is not None and set(planned.paper.trained) == {variant.name for variant in variants}
    assert (planned.fine_tune is not None) == bool(planned.paper.tuned) == (table in ("1", "2", "6"))
    measured = {name for name in planned.paper.columns.values() if name is not None}
    assert planned.tasks is not None and measured == set(planned.tasks.names)
    for variant in variants:
        assert variant.train["per_device_train_batch_size"] * variant.train["gradient_accumulation_steps"] == 64
        assert variant.train["max_steps"] == (8392 if table.startswith("5") else 11444)
        assert "bf16" not in variant.train, "the default follows the device"
        assert variant.train.get("trainable") == ("all" if variant.name == "Base" else None)


def test_a_table_is_planned_small_by_a_file_behind_it(tmp_path, monkeypatch):
    room = write_room(tmp_path)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    words = [f"base={room / 'base'}", f"train.corpus={room / 'corpus'}", "train.sequence_length=64"]
    words += [f"domain.articles={room / 'stars.txt'}", "fine_tune.dataset_name=chats", "tasks.data=questions"]
    arguments = read("1", *words, small=True)
    few = {
        name: arguments.variants[name] for name in ("LESA", "MIDUS-HML")
    }  # others need more layers than the tiny base has
    arguments = dataclasses.replace(arguments, variants=few)
    planned, variants = plan(arguments)
    check(planned, variants)
    assert [variant.name for variant in variants] == ["LESA", "MIDUS-HML"]
    assert {variant.train["max_steps"] for variant in variants} == {50}
    assert planned.paper.columns["Wiki-PPL"] == "articles" and planned.paper.columns["PIQA"] == "piqa"


# Whose printed average is not that of the row, as the table's file says.
MISPRINTED = {("2", "SOLAR", "tuned")}


@pytest.mark.parametrize("table", [table for table in TABLES if not table.startswith("5")])
def test_the_paper_s_averages_are_those_of_its_rows(table):
    """Numbers that were copied wrongly would not be."""
    paper = read(table).paper
    for stage in ("trained", "tuned"):
        for row, numbers in getattr(paper, stage).items():
            is_right = numbers[-1] == pytest.approx(sum(numbers[1:-1]) / (len(numbers) - 2), abs=0.0075)
            assert is_right == ((table, row, stage) not in MISPRINTED), row


PAPER = PaperOptions(
    title="Table 1",
    columns={"Wiki": "plants", "ARC": "arc_easy", "PIQA": "piqa", "MMLU": "mmlu", "Average": None},
    trained={"hml": [11.64, 66.16, 75.08, None, 53.5], "full": [1.0] * 5},
    tuned={"hml": [11.75, 66.33, 75.9, 37.82, 54.08]},
)


def run(seed: int = 0, **changes) -> Result:
    point = Point(1, {"plants": math.log(20.0), "stars": 2.0})
    tasks = {"piqa": {"acc": 0.7, "acc_norm": 0.75}, "mmlu": {"acc": 0.25}}
    tuned = Measured({"plants": math.log(30.0), "stars": 2.0}, {"piqa": {"acc_norm": 0.6}})
    arguments = {"curve": [Point(0, point.losses), point], "tasks": tasks, "tuned": tuned, **changes}
    return dataclasses.replace(result("hml", [0.5], seed=seed), **arguments)


def test_numbers_are_per_cent_perplexities_and_a_mean_where_all_tasks_were_measured():
    numbers = {name: paper_number(PAPER, name, run()) for name in PAPER.columns}
    assert numbers == {"Wiki": pytest.approx(20.0), "ARC": None, "PIQA": 75.0, "MMLU": 25.0, "Average": None}
    whole = run(tasks={"arc_easy": {"acc": 0.2}, "piqa": {"acc": 0.5}, "mmlu": {"acc": 0.5}})
    assert paper_number(PAPER, "Average", whole) == pytest.approx(40.0)
    tuned = {name: paper_number(PAPER, name, run(), tuned=True) for name in PAPER.columns}
    assert tuned == {"Wiki": pytest.approx(30.0), "ARC": None, "PIQA": 60.0, "MMLU": None, "Average": None}
    assert paper_number(PAPER, "PIQA", run(tuned=None), tuned=True) is None


def test_the_word_perplexity_of_a_task_is_no_accuracy():
    paper = dataclasses.replace(
        PAPER, columns={"Wiki": "wikitext", "PIQA": "piqa", "Average": None}, trained={}, tuned={}
    )
    measured = run(tasks={"wikitext": {"word_perplexity": 13.2}, "piqa": {"acc": 0.5}})
    assert [paper_number(paper, name, measured) for name in paper.columns] == [13.2, 50.0, 50.0]


def test_the_paper_s_numbers_stand_below_ours():
    runs = [run(), run(seed=1, tasks={"piqa": {"acc_norm": 0.65}})]
    trained, tuned = paper_tables(findings(comparison(["hml", "full"], paper=PAPER, validation={}), BASE, runs, {}))
    assert trained.title == "Table 1: after training" and trained.head == ["", *PAPER.columns, "seeds"]
    assert trained.rows == [
        ["hml", "20.00 ± 0.00", "-", "70.00 ± 7.07", "25.00", "-", "2"],
        ["paper", "11.64", "66.16", "75.08", "-", "53.50", ""],
    ]
    assert tuned.rows[0][3] == "60.00 ± 0.00" and tuned.rows[1][4] == "37.82"


def test_a_comparison_by_tasks_alone_has_a_report(tmp_path):
    changes = {
        "domain": {},
        "retention": {},
        "validation": {},
        "controls": False,
        "tasks": TaskOptions(names=["piqa"]),
    }
    base = Result("base", {}, 0, [Point(0, {})], tasks={"piqa": {"acc": 0.5}})
    measured = run(curve=[], tuned=None)
    one = findings(comparison(["hml"], paper=PAPER, **changes), base, [measured], {})
    first = tables(one)[0]
    assert first.rows[1][:2] == ["hml", "0.001"] and "domain loss" not in first.head
    assert "Table 1: after training" in write_report(tmp_path, one).read_text()
    assert one.variants[0].learned is None and json.dumps(as_json(one, tmp_path), allow_nan=False)
