"""What is told of null controls."""

import pytest
from compare.made_results import DOMAIN, FULL, HML, NULL, RETENTION, found, result, rows_of

from midus_hf.compare.report.tables import as_json, controls_table, variants_table
from midus_hf.compare.report.words import sentences


def test_variants_stand_beside_their_null_controls():
    one = found([*HML, *FULL, *NULL], variants=["hml", "full"])
    # Lower by 0.25 with both seeds: the interval has no width.
    assert rows_of(controls_table(one)) == {
        "hml": {
            "variant": "hml", "null control": "one-row", "nats lower than the null control": "+0.2500", "95 % interval": "± 0.0000",
            "seeds": "2", "": "beats it",
        }
    }  # fmt: skip
    told = as_json(one, [])["variants"][0]["controls"]
    assert told == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2, "verdict": "beats it"}}
    assert "hml+one-row" not in rows_of(variants_table(one))
    assert not any("null control" in sentence for sentence in sentences(one))


def test_a_control_that_is_not_beaten_is_told():
    better = [result("hml+one-row", [0.9], seed=seed, control="one-row", control_of="hml") for seed in (0, 1)]
    wide = [
        result("hml+random-slots", [learned], seed=seed, control="random-slots", control_of="hml")
        for seed, learned in ((0, 0.5), (1, 0.1))
    ]
    told = sentences(found([*HML, *better, *wide], variants=["hml"]))
    assert "hml does not beat its null control one-row." in told
    assert "hml is not shown to beat its null control random-slots." in told


def test_controls_at_a_rate_that_is_not_the_best_any_more_are_left_out():
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]
    assert controls_table(found([*HML, *faster, *NULL], variants=["hml"])).rows == []


@pytest.mark.parametrize(
    ("rises", "interval", "words"),
    [
        ([0.5, 0.5], "± 0.0000", "its addresses matter"),
        ([0.5, 0.25], "± 1.5883", "its addresses are not shown to matter"),
        ([0.0, 0.0], "± 0.0000", "its addresses do not matter"),
        ([-0.25], "", "its addresses do not matter"),
        ([0.5], "", "one seed"),
    ],
    ids=str,
)
def test_shuffled_addresses_are_told_by_what_the_loss_rises(rises, interval, words):
    # What the run measured itself, in the precision of training, is no part of it.
    runs = [
        result("hml", [0.75], seed=seed, shuffled={DOMAIN: 2.5 + rise, RETENTION: 9.0}, unshuffled={DOMAIN: 2.5, RETENTION: 2.0})
        for seed, rise in enumerate(rises)
    ]  # fmt: skip
    one = found(runs, variants=["hml"])
    mean = sum(rises) / len(rises)
    (row,) = controls_table(one).rows
    assert row == ["hml", "shuffled-addresses", f"{mean:+.4f}", interval, str(len(rises)), words]
    assert as_json(one, [])["variants"][0]["controls"]["shuffled-addresses"]["verdict"] == words


def test_earlier_results_of_shuffled_addresses_are_held_against_the_run_s_own_end():
    runs = [result("hml", [0.5], shuffled={DOMAIN: 2.75, RETENTION: 2.0})]
    assert (
        rows_of(controls_table(found(runs, variants=["hml"])))["hml"]["nats lower than the null control"] == "+0.2500"
    )
