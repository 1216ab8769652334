"""What is written of a comparison, done or not: JSON, CSV, a page and its picture."""

import csv
import html
import importlib.util
import json
import math
import re

import pytest
from compare.made_results import (
    BASE,
    DOMAIN,
    FULL,
    FULL_SLOW,
    HML,
    NULL,
    RETENTION,
    VALIDATION,
    found,
    result,
    rows_of,
)

from midus_hf.compare.findings import sentences
from midus_hf.compare.report import (
    as_json,
    draw,
    made_table,
    short_count,
    tables,
    variants_table,
    write_report,
    write_runs,
)


def test_variants_without_results_and_failures_are_told():
    one = found(HML, failures={"full/0.001/seed-0": "midus train | failed"}, missing=2)
    assert list(rows_of(variants_table(one))) == ["base", "hml"]
    assert tables(one)[-1].title == "Failed" and tables(one)[-1].rows == [
        ["full/0.001/seed-0", "midus train | failed"]
    ]
    assert sentences(one)[-1] == "Runs that are not done: 2, of which 1 failed."
    assert sentences(found(HML, missing=1))[-1] == "Runs that are not done: 1."
    report = as_json(one, [])
    assert report["failed"] == {"full/0.001/seed-0": "midus train | failed"} and report["missing"] == 2


def test_where_no_run_is_done_the_report_says_so(tmp_path):
    one = found([], missing=6)
    assert sentences(one) == ["No run is done yet."]
    assert list(rows_of(variants_table(one))) == ["base"]
    assert [path.name for path in write_report(tmp_path, one, [])] == ["runs.csv", "report.html"]
    assert "<h1>What variants of base learned and forgot</h1>" in (tmp_path / "report.html").read_text()
    report = as_json(one, [])
    assert (report["variants"], report["base"]["losses"]) == ([], {DOMAIN: 3.0, RETENTION: 2.0, VALIDATION: 4.0})


def test_json_has_the_numbers_of_the_tables():
    report = as_json(found([*HML, *FULL, *FULL_SLOW, *NULL]), [])
    full, hml = report["variants"]
    distance = pytest.approx(0.25 / math.sqrt(2))
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": distance, "count": 2}
    assert hml["learned"] == {"mean": 0.625, "deviation": distance, "count": 2} and hml["seeds"] == [0, 1]
    assert hml["forgotten"]["mean"] == 0.25 and full["rate"] == "0.001"
    assert json.loads(json.dumps(report, allow_nan=False)) == report


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


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_the_page_needs_no_other_file_and_says_what_the_tables_say(tmp_path, monkeypatch, has_matplotlib):
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    runs = [*HML, *FULL, *FULL_SLOW, *NULL]
    one = found(runs, failures={"a<b": "1 & 2"}, missing=1, base="/folder/of/a/base")
    assert [path.name for path in write_report(tmp_path, one, runs)] == ["runs.csv", "report.html"]
    page = (tmp_path / "report.html").read_text().replace("\u00a0", " ")
    assert page.count("data:image/png;base64,") == has_matplotlib
    assert not re.findall(r"(?:src|href)=(?!\"data:)|@import|url\(|<script", page)
    for table in tables(one):
        assert f"<h3>{table.title}</h3>" in page
        for row in table.rows:
            assert "<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" in page
    assert all(f"<p>{html.escape(sentence)}</p>" in page for sentence in sentences(one))
    assert "<h1>What variants of base learned and forgot</h1>" in page and "/folder" not in page
    assert page.rindex("<table>") < page.index("A null control is the same memory"), "caveats stand below tables"


def test_the_report_says_how_each_variant_was_made():
    keys = {
        "hml": {"upscale": {"method": "midus-hml", "num_new_layers": 10, "options": {"n": 32}}},
        "engram": {"upscale": {"method": "engram", "options": {"table": "exact", "corpus": __file__, "width": 8}}},
        "pro": {"upscale": {"method": "llama-pro", "num_new_layers": 3, "placement": "1,2,3"}},
        "lora": {"train": {"adapters": {"r": 8}}},
        "full": {"train": {"trainable": "all"}},
    }
    results = [result(name, [0.1], request=request) for name, request in keys.items()]
    rows = {row[0]: row[1:] for row in made_table(found(results, variants=keys)).rows}
    assert rows == {
        "hml": ["midus-hml", "10 distributed", "n=32, k=4"], "pro": ["llama-pro", "3 1,2,3", ""],
        "engram": ["engram", "", "layers=published, table=exact, corpus=test_report.py, width=8"], "lora": ["LoRA", "", "r=8"],
        "full": ["the base", "", ""],
    }  # fmt: skip


UPSCALED = {"starts_at_base": False, "upscaled": {DOMAIN: 7.0, RETENTION: 2.0, VALIDATION: 8.0}}
CURVES = {
    "several seeds": ([*HML, *FULL, *FULL_SLOW], {}),
    "no text outside": ([*HML, *FULL], {"retention": {}}),
    "lengths that differ": ([result("hml", [0.1, 0.2, 0.3]), result("hml", [0.1], seed=1), result("full", [0.5])], {}),
    "a start elsewhere": (
        [result("hml", [0.1]), result("full", [4.0, 4.5], [-1, -0.5], loss=7.0, **UPSCALED)],
        {},
    ),
    "certified": ([result("hml", [0.1], certificate={}), result("full", [0.5])], {}),
    "the start alone": ([result("hml", []), result("full", [])], {}),
    "eleven variants": ([result(f"variant-{number}", [0.1]) for number in range(11)], {}),
}


@pytest.mark.parametrize("curves", CURVES)
def test_a_picture_is_drawn_of_whatever_there_is(curves):
    pytest.importorskip("matplotlib")
    results, changes = CURVES[curves]
    variants = list(dict.fromkeys(one.variant for one in results))
    assert draw(found(results, variants=variants, **changes)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0"), (999, "999"), (1000, "1k"), (47584, "47.6k"), (999_499, "999k"), (999_500, "1M"), (8_890_000, "8.89M")]
    + [(999_999_999, "1B"), (1_240_000_000, "1.24B"), (70_600_000_000, "70.6B")],
)
def test_parameters_are_counted_in_short(number, expected):
    assert short_count(number) == expected


def test_a_run_that_took_no_time_has_no_speed():
    one = found([result("hml", [0.5], seconds=0.0)], variants=["hml"])
    assert rows_of(variants_table(one))["hml"]["tokens/s"] == ""
