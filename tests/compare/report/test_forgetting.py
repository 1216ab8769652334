"""What variants had forgotten when they had learned equally much."""

import dataclasses
import math

import pytest
from compare.made_results import FULL, FULL_SLOW, HML, RETENTION, between, found, result, rows_of

from midus_hf.compare.report.tables import as_json, equal_learning_table, tables, variants_table
from midus_hf.compare.report.words import sentences


def test_forgetting_at_equal_learning_is_read_off_the_paths_of_the_rate_that_is_best_for_it():
    one = found([*HML, *FULL, *FULL_SLOW])
    assert one.common_learning == 0.5
    rows = rows_of(equal_learning_table(one))
    # Of hml the second seed is halfway from (0.25, 0) to (0.75, 0.375); full is better at its slow rate, with 0.25 of both.
    assert rows["hml"]["change of the loss outside the domain"] == f"+0.1562 ± {0.0625 / math.sqrt(2):.4f}"
    assert rows["full"] == {
        "variant": "full",
        "rate": "0.0001",
        "change of the loss outside the domain": "+0.2500 ± 0.0000",
    }
    assert list(rows) == ["hml", "full"]
    assert equal_learning_table(one).title == "Forgotten when 0.5000 nats were learned"
    (told,) = [sentence for sentence in sentences(one) if "forgotten least" in sentence]
    assert told.startswith("When 0.5000 nats are learned, as 2 of 2 variants did, hml has forgotten least")
    assert "by +0.1562 ± 0.0442, that of full, the next, by +0.2500 ± 0.0000." in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [((-0.5, 0.5), "has forgotten least"), ((0.25, 0.5), "has forgotten least"), ((-0.5, -0.25), "has gained most outside as well")],
    ids=str,
)  # fmt: skip
def test_where_nobody_forgot_nobody_is_said_to_have(changes, words):
    runs = [result(name, [0.5], [change]) for name, change in zip(("hml", "full"), changes, strict=True)]
    told = between(sentences(found(runs)), "When 0.5000 nats are learned")
    assert f"hml {words}: the loss outside the domain has changed by {changes[0]:+.4f}, that of full" in told


def test_variants_that_learned_less_than_half_of_them_did_are_not_compared():
    slow = [dataclasses.replace(run, variant="moc", curve=run.curve[:1] * 2) for run in HML]
    one = found([*HML, *FULL, *slow], variants=("hml", "full", "moc"))
    assert one.common_learning == 0.5, "and not what moc learned, which is nothing"
    assert list(rows_of(equal_learning_table(one))) == ["hml", "full"]
    assert any("as 2 of 3 variants did" in sentence for sentence in sentences(one))


def test_a_rate_at_which_a_seed_is_missing_or_never_learned_so_much_is_not_the_one_that_forgot_least():
    missing = [result("full", [0.5], [-9.0], seed=0, rate=1e-2)]
    slow = [result("full", [learned], [-9.0], seed=seed, rate=1e-5) for seed, learned in ((0, 0.5), (1, 0.125))]
    one = found([*HML, *FULL, *FULL_SLOW, *missing, *slow])
    assert rows_of(equal_learning_table(one))["full"]["rate"] == "0.0001"


def test_rates_over_unlike_seeds_are_compared_by_what_they_forgot_with_those_in_common():
    other = [result("full", [0.5], [forgotten], seed=seed, rate=1e-4) for seed, forgotten in ((0, 0.375), (2, 0.0))]
    row = rows_of(equal_learning_table(found([*HML, *FULL, *other])))["full"]
    # With seed 0 the first rate had forgotten 0.25; over all of its seeds 0.375, and the other 0.1875.
    assert row["rate"] == "0.001" and row["change of the loss outside the domain"].startswith("+0.3750")


def test_where_nothing_was_learned_forgetting_is_not_compared():
    # One run passes the point at which nothing is learned on its way up: that is no learning to compare at.
    one = found([result("hml", [-0.5, -0.25], [0.0, 1.0]), result("full", [-0.25, 0.5], [0.5, 1.0])])
    assert one.common_learning == 0.0
    assert "Forgotten" not in " ".join(table.title for table in tables(one))
    assert not any("forgotten least" in sentence for sentence in sentences(one))
    assert [variant["forgotten_at_equal_learning"] for variant in as_json(one, [])["variants"]] == [None, None]


def test_without_texts_outside_nothing_is_said_of_forgetting():
    one = found([*HML, *FULL], retention={})
    for table in tables(one):
        assert "forgotten" not in table.head and RETENTION not in table.head and "Forgotten" not in table.title
    assert len(variants_table(one).rows[0]) == len(variants_table(one).head)
    assert not any("forgot" in sentence for sentence in sentences(one))
    told = as_json(one, [])
    assert [variant["forgotten"] for variant in told["variants"]] == [None, None]
