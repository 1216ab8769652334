"""What is told of tasks and of fine-tuned models."""

import math

import pytest
from compare.made_results import DOMAIN, FULL, RETENTION, found, result, rows_of

from midus_hf.compare.options import TaskOptions
from midus_hf.compare.report.findings import metric_of
from midus_hf.compare.report.tables import tuned_table, variants_table
from midus_hf.compare.results import Measured


def test_a_task_that_was_asked_on_one_side_alone_is_not_told():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    runs = [result("hml", [0.5], tasks_before={"mmlu": {"acc": 0.5}}, tasks={"piqa": {"acc": 0.5}})]
    row = rows_of(variants_table(found(runs, variants=["hml"], tasks=tasks)))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("", "")


def test_of_fine_tuned_models_losses_and_tasks_are_told_by_a_hand_s_numbers():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    metrics = [{"piqa": {"acc": 0.0}, "mmlu": {"acc": 0.5}}, {"piqa": {"acc": 0.5}}]
    runs = [
        result("hml", [0.5], seed=seed, tuned=Measured({DOMAIN: 2.0 + seed, RETENTION: 1.0}, metrics[seed]))
        for seed in (0, 1)
    ]
    rows = rows_of(tuned_table(found([*runs, *FULL], variants=["hml", "full"], tasks=tasks)))
    spread_of = f"{1 / math.sqrt(2):.4f}"
    assert rows == {
        "hml": {
            "variant": "hml", "rate": "0.001", DOMAIN: f"2.5000 ± {spread_of}", RETENTION: "1.0000 ± 0.0000",
            "piqa": "0.250 ± 0.354", "mmlu": "",
        }
    }  # fmt: skip


def test_tasks_are_told_before_and_after():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    given = {
        "tasks_before": {"piqa": {"acc": 0.25, "acc_norm": 0.5}},
        "tasks": {"piqa": {"acc": 0.5, "acc_norm": 0.75}},
    }
    one = found(
        [result("hml", [0.5], seed=0, **given), result("hml", [0.5], seed=1, **given)], variants=["hml"], tasks=tasks
    )
    row = rows_of(variants_table(one))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("0.500 → 0.750 ± 0.000", "")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [({"acc": 0.5, "acc_norm": 0.25}, 0.25), ({"acc": 0.5}, 0.5), ({"exact_match": 1.0}, 1.0), ({"ter": 3.0}, None), ({}, None)],
    ids=str,
)  # fmt: skip
def test_which_metric_of_a_task_is_told(metrics, told):
    assert metric_of(metrics) == told
