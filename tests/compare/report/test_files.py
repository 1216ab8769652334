"""What is written of a comparison, done or not: JSON, CSV, a page and its pictures."""

import csv
import importlib.util
import json
import math
import re

import pytest
from compare.made_results import BASE, DOMAIN, FULL, FULL_SLOW, HML, NULL, RETENTION, found, result, rows_of

from midus_hf.compare.report.sentences import cautions, sentences, short_count, with_spread
from midus_hf.compare.report.tables import as_json, as_markdown, tables, variants_table
from midus_hf.compare.report.writing import write_report, write_runs


def test_variants_without_results_and_failures_are_told():
    one = found(HML, failures={"full/0.001/seed-0": "midus train | failed"}, missing=2)
    assert list(rows_of(variants_table(one))) == ["base", "hml"]
    (failed,) = [table for table in tables(one) if table.title == "Failed"]
    assert failed.rows == [["full/0.001/seed-0", "midus train | failed"]]
    assert r"| full/0.001/seed-0 | midus train \| failed |" in as_markdown(failed)
    assert "2 runs are not done, of which 1 failed." in sentences(one)
    told = as_json(one, [])
    assert told["failed"] == {"full/0.001/seed-0": "midus train | failed"} and told["missing"] == 2


@pytest.mark.parametrize(
    ("failures", "missing", "words"),
    [({}, 1, "1 run is not done."), ({}, 3, "3 runs are not done."), ({"a": "b"}, 1, "1 run is not done; it failed.")],
    ids=["one", "three", "one failed"],
)
def test_what_is_not_done_is_told_in_words(failures, missing, words):
    assert words in sentences(found(HML, failures=failures, missing=missing))


def test_where_no_run_is_done_the_report_says_so(tmp_path):
    one = found([], missing=6)
    assert sentences(one) == ["No run is done yet."]
    assert list(rows_of(variants_table(one))) == ["base"]
    assert [path.name for path in write_report(tmp_path, one, [])] == ["report.md", "runs.csv"]
    told = as_json(one, [])
    assert (told["variants"], told["base"]["losses"]) == ([], {DOMAIN: 3.0, RETENTION: 2.0})


def test_json_has_the_numbers_of_the_tables():
    told = as_json(found([*HML, *FULL, *FULL_SLOW, *NULL]), [])
    hml, full = told["variants"]
    distance = pytest.approx(0.25 / math.sqrt(2))
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": distance, "count": 2}
    assert hml["learned"] == {"mean": 0.625, "deviation": distance, "count": 2} and hml["seeds"] == [0, 1]
    assert hml["forgotten"]["mean"] == 0.25 and full["rate"] == "0.001"
    assert told["cautions"] == cautions(found([*HML, *FULL, *FULL_SLOW])) and len(told["cautions"]) == 2
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_csv_has_a_row_for_each_run_and_moment(tmp_path):
    write_runs(tmp_path / "runs.csv", [BASE, HML[0], NULL[0]], [DOMAIN, RETENTION])
    with (tmp_path / "runs.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["variant"], row["step"]) for row in rows] == [
        ("base", "0"), *(("hml", str(step)) for step in range(3)), *(("hml+one-row", str(step)) for step in range(3))
    ]  # fmt: skip
    assert rows[3] == {
        "variant": "hml", "control_of": "", "control": "", "rate": "0.001", "seed": "0", "new_parameters": "0",
        "trained_parameters": "1000", "step": "2", "tokens": "200", "seconds": "2.0", f"loss_{DOMAIN}": "2.5",
        f"loss_{RETENTION}": "2.125",
    }  # fmt: skip
    assert (rows[0]["new_parameters"], rows[0]["trained_parameters"], rows[0]["rate"]) == ("0", "0", "recipe")
    assert (rows[4]["control_of"], rows[4]["control"], rows[1]["seconds"]) == ("hml", "one-row", "")


def test_the_page_needs_no_other_file_and_says_what_the_tables_say(tmp_path):
    pytest.importorskip("matplotlib")
    one = found([*HML, *FULL, *FULL_SLOW, *NULL], variants=["hml", "full"], failures={"a<b": "1 & 2"}, missing=1)
    files = write_report(tmp_path, one, [*HML, *FULL, *FULL_SLOW, *NULL])
    assert [path.name for path in files] == ["report.md", "runs.csv", "report.html"]
    page, markdown = files[2].read_text(), files[0].read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.findall(r"(?:src|href)=(?!\"data:)|@import|url\(|<script", page)
    assert "a&lt;b" in page and "1 &amp; 2" in page and "a<b" not in page
    for table in tables(one):
        assert f"**{table.title}**" in markdown
        for row in table.rows[1:]:
            assert f"| {' | '.join(row)} |" in markdown
            assert (
                "<tr>" + "".join(f"<td>{word}</td>" for word in row).replace("&", "&amp;") + "</tr>" in page
                or "a<b" in row
            )
    for sentence in sentences(one):
        assert f"- {sentence}" in markdown
    assert markdown.startswith("# hml, full on base\n")


def test_without_matplotlib_there_is_no_page(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert [path.name for path in write_report(tmp_path, found(HML), HML)] == ["report.md", "runs.csv"]


CURVES = {
    "several seeds": ([*HML, *FULL, *FULL_SLOW], {}),
    "one seed": ([HML[0], FULL[0]], {}),
    "no text outside": ([*HML, *FULL], {"retention": {}}),
    "curves of different lengths": (
        [result("hml", [0.1, 0.2, 0.3]), result("hml", [0.1], seed=1), result("full", [0.5])],
        {},
    ),
    "a start elsewhere": (
        [
            result("hml", [0.1]),
            result(
                "full", [4.0, 4.5], [-1, -0.5], loss=7.0, starts_at_base=False, upscaled={DOMAIN: 7.0, RETENTION: 2.0}
            ),
        ],
        {},
    ),
    "the start alone": ([result("hml", []), result("full", [])], {}),
    "eleven variants": ([result(f"variant-{number}", [0.1]) for number in range(11)], {}),
}


@pytest.mark.parametrize("curves", CURVES)
def test_pictures_are_drawn_of_whatever_there_is(tmp_path, curves):
    pytest.importorskip("matplotlib")
    from midus_hf.compare.report.pictures import pictures

    results, changes = CURVES[curves]
    variants = list(dict.fromkeys(one.variant for one in results))
    drawn = pictures(found(results, variants=variants, **changes))
    expected = ["Learning against forgetting", "Loss of the domain by tokens", "Loss outside the domain by tokens"]
    expected = [expected[1]] if "retention" in changes else expected
    assert list(drawn) == expected
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())
    assert len(set(drawn.values())) == len(drawn)


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0"), (999, "999"), (1000, "1k"), (47584, "47.6k"), (999_499, "999k"), (999_500, "1M"), (8_890_000, "8.89M")]
    + [(999_999_999, "1B"), (1_240_000_000, "1.24B"), (70_600_000_000, "70.6B")],
)
def test_parameters_are_counted_in_short(number, told):
    assert short_count(number) == told


def test_a_spread_is_told_behind_its_mean():
    one = found([*HML, *FULL])
    assert with_spread(one.variants["hml"].learned, "{:+.2f}") == "+0.62 ± 0.18"
    assert with_spread(None) == ""


def test_a_run_that_took_no_time_has_no_speed():
    (_, row) = variants_table(found([result("hml", [0.5], seconds=0.0)], variants=["hml"])).rows
    assert row[variants_table(found(HML)).head.index("tokens/s")] == ""
