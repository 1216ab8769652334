"""What is written of a comparison, done or not: tables, JSON, a page and its picture."""

import base64
import dataclasses
import html
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
from compare.made_results import BASE, DOMAIN, FULL, FULL_SLOW, HML, NULL, SOLAR, comparison, found, result, rows_of

from midus_hf.compare.findings import cautions, findings
from midus_hf.compare.options import TaskOptions
from midus_hf.compare.report import (
    as_json,
    controls_table,
    differences_table,
    draw,
    made_table,
    metric_of,
    short_count,
    tables,
    variants_table,
    write_report,
)
from midus_hf.compare.runs import Point, Result

PAGE = Path("report.html")
TASKS = TaskOptions(names=["piqa", "mmlu"])


def test_the_table_of_variants_has_the_numbers_that_a_hand_computes():
    rows = rows_of(variants_table(found([*HML, *FULL, *FULL_SLOW])))
    # 3 - 0.5 and 3 - 0.75: 2.5 and 2.25; the sample deviation of two numbers is their distance by the root of 2.
    assert list(rows) == ["base", "full", "hml"]
    distance = 0.25 / math.sqrt(2)
    assert rows["hml"] == {
        "variant": "hml",
        "rate": "0.001",
        "seeds": "2",
        "trained parameters": "1k",
        "domain loss": f"2.3750 ± {distance:.4f}",
        "learned": f"+0.6250 ± {distance:.4f}",
        "forgotten": f"+0.2500 ± {distance:.4f}",
        "seconds": "2",
        "peak GB": "1.00",
        "starts at base": "",
    }
    assert rows["full"]["rate"] == "0.001" and rows["full"]["domain loss"] == f"1.7500 ± {0.5 / math.sqrt(2):.4f}"
    assert {key: value for key, value in rows["base"].items() if value} == {"variant": "base", "domain loss": "3.0000"}


def test_marks_tasks_and_texts_of_variants_are_told():
    starts = {(None, None): "", (True, True): "yes", (False, False): "no", (True, False): "no", (True, None): "no"}
    for told, expected in starts.items():
        runs = [result("hml", [0.5], seed=seed, starts_at_base=one) for seed, one in enumerate(told)]
        assert rows_of(variants_table(found(runs, variants=["hml"])))["hml"]["starts at base"] == expected, told
    certified = [result("hml", [0.5], seed=seed, is_certified=True) for seed in (0, 1)]
    rows = rows_of(variants_table(found([*certified, *FULL])))
    assert {name: row["certified"] for name, row in rows.items()} == {"base": "", "hml": "yes", "full": ""}
    half = [dataclasses.replace(certified[0], is_certified=False), certified[1]]
    assert "certified" not in variants_table(found([*half, *FULL])).head
    runs = [result("hml", [0.5], seed=seed, tasks={"piqa": {"acc": 0.5, "acc_norm": 0.75}}) for seed in (0, 1)]
    base = dataclasses.replace(BASE, tasks={"piqa": {"acc": 0.5}, "mmlu": {"acc": 0.25}})
    rows = rows_of(variants_table(findings(comparison(["hml"], tasks=TASKS), base, runs, {})))
    assert [(row["piqa"], row["mmlu"]) for row in rows.values()] == [("0.500", "0.250"), ("0.750 ± 0.000", "")]
    one = found([*HML, *FULL], retention={})  # nothing is said of forgetting
    assert "forgotten" not in variants_table(one).head and differences_table(one).rows[0][2] == ""
    assert [variant.forgotten for variant in one.variants] == [None, None]


def test_the_report_says_how_each_variant_was_made():
    requests = {
        "hml": {"upscale": {"method": "midus-hml", "num_new_layers": 10, "options": {"n": 32}}},
        "engram": {"upscale": {"method": "engram", "options": {"corpus": __file__, "table": "exact"}}},
        "hashed": {"upscale": {"method": "engram", "options": {"rows": 7530}}},
        "pro": {"upscale": {"method": "llama-pro", "num_new_layers": 3, "placement": "1,2,3"}},
        "lora": {"train": {"adapters": {"r": 8, "lora_alpha": 16}}},
        "full": {"train": {"trainable": "all"}},
    }
    one = found([result(name, [0.1], request=request) for name, request in requests.items()], variants=requests)
    assert tables(one)[1] == made_table(one)
    assert {row[0]: row[1:] for row in made_table(one).rows} == {
        "hml": ["midus-hml", "10", "distributed", "k=4, n=32"],
        "engram": ["engram", "", "", "table=exact, layers=published, corpus=test_report.py"],
        "hashed": ["engram", "", "", "rows=7530, layers=published"],
        "pro": ["llama-pro", "3", "1,2,3", ""],
        "lora": ["LoRA", "", "", "r=8, lora_alpha=16"],
        "full": ["the base", "", "", ""],
    }


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"acc": 0.5, "acc_norm": 0.25}, 0.25),
        ({"acc": 0.5}, 0.5),
        ({"exact_match,first-clause": 0.5, "exact_match,any": 1.0}, 0.5),
        ({"word_perplexity,none": 12.5, "byte_perplexity,none": 1.5}, 12.5),
        ({"ter": 3.0}, None),
        ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_which_metric_of_a_task_is_told(metrics, expected):
    assert metric_of(metrics) == expected


def test_variants_are_subtracted_from_what_learned_most_seed_by_seed_and_stand_beside_null_controls():
    # full learned 1.0 and 1.5, hml 0.5 and 0.75; full forgot 1.0 and 2.0, hml 0.125 and 0.375.
    one = found([*HML, *FULL, *NULL])
    table = differences_table(one)
    assert table.title == "Difference to full, which learned most, paired by seed, with 95 % intervals"
    # Of two numbers that differ by d, the deviation is d by the root of 2, and half of the interval 12.706 / 2 d.
    assert table.rows == [["hml", f"-0.6250 ± {12.706 / 8:.4f}", f"-1.2500 ± {12.706 * 3 / 8:.4f}", "2"]]
    assert differences_table(found([HML[0], FULL[0]])).rows == [["hml", "-0.5000", "-0.8750", "1"]]
    assert differences_table(found(HML)).rows == []
    # Lower by 0.25 with both seeds: the interval has no width.
    assert controls_table(one).rows == [["hml", "one-row", "+0.2500 ± 0.0000", "2", "beats it"]]
    assert "hml+one-row" not in rows_of(variants_table(one))


def test_where_no_run_is_done_there_is_a_report_of_the_base(tmp_path):
    one = found([], missing=6)
    assert list(rows_of(variants_table(one))) == ["base"]
    assert "<h1>What variants of base learned and forgot</h1>" in write_report(tmp_path, one).read_text()
    report = as_json(one, PAGE)
    assert report["variants"] == [] and report["base_losses"][DOMAIN] == 3.0


def test_json_has_the_numbers_of_the_tables_and_all_results():
    report = json.loads(json.dumps(as_json(found([*HML, *FULL, *FULL_SLOW, *NULL]), PAGE), allow_nan=False))
    full, hml = report["variants"]
    distance = pytest.approx(0.25 / math.sqrt(2))
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": distance, "count": 2}
    assert hml["learned"] == {"mean": 0.625, "deviation": distance, "count": 2} and hml["learned_by_seed"]["1"] == 0.75
    assert hml["forgotten"]["mean"] == 0.25 and full["rate"] == "0.001"
    assert hml["advantages"] == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2}}
    assert report["reference"] == "full" and report["differences"]["hml"]["learned"]["mean"] == -0.625
    assert [point["losses"][DOMAIN] for point in hml["results"][0]["curve"]] == [3.0, 2.75, 2.5]


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_the_page_needs_no_other_file_and_says_what_the_tables_say(tmp_path, monkeypatch, has_matplotlib):
    runs = [*HML, *FULL, *FULL_SLOW, *NULL]
    one = found(runs, failures={"a<b": "1 & 2"}, missing=1, base="/folder/of/a/base")
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        (tmp_path / "frontier.png").write_text("of an earlier report")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = write_report(tmp_path, one).read_text().replace("\u00a0", " ")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", *["frontier.png"] * has_matplotlib}
    assert page.count("data:image/png;base64,") == has_matplotlib
    if has_matplotlib:
        assert base64.b64encode((tmp_path / "frontier.png").read_bytes()).decode() in page
    assert not re.findall(r"(?:src|href)=(?!\"data:)|@import|url\(|<script", page)
    for table in tables(one):
        assert f"<h3>{table.title}</h3>" in page
        for row in table.rows:
            assert "<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" in page
    assert all(f"<p>{html.escape(sentence)}</p>" in page for sentence in cautions(one))
    assert "<h1>What variants of base learned and forgot</h1>" in page and "/folder" not in page


PICTURES = {
    "a start elsewhere": [result("hml", [0.1]), *SOLAR],
    "the start alone": [result("hml", []), result("full", [])],
    "a certificate": [result("hml", [0.1], is_certified=True), *FULL],
    "eleven variants": [result(f"variant-{number}", [0.1]) for number in range(11)],
}


@pytest.mark.parametrize("results", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_drawn_of_whatever_there_is(results):
    pytest.importorskip("matplotlib")
    variants = list(dict.fromkeys(one.variant for one in results))
    assert draw(found(results, variants=variants)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0"), (999, "999"), (1000, "1k"), (47584, "47.6k"), (999_499, "999k"), (999_500, "1M"), (8_890_000, "8.89M")]
    + [(999_999_999, "1B"), (1_240_000_000, "1.24B"), (70_600_000_000, "70.6B")],
)
def test_parameters_are_counted_in_short(number, expected):
    assert short_count(number) == expected


def test_a_comparison_by_tasks_alone_has_a_report(tmp_path):
    base = Result("base", {}, 0, [Point(0, {})], tasks={"piqa": {"acc": 0.5}})
    run = dataclasses.replace(result("hml", [0.5]), curve=[], tasks={"piqa": {"acc": 0.7, "acc_norm": 0.75}})
    changes = {kind: {} for kind in ("domain", "retention", "validation")} | {"tasks": TaskOptions(names=["piqa"])}
    one = findings(comparison(["hml"], controls=False, **changes), base, [run], {})
    first = tables(one)[0]
    assert [row[:2] for row in first.rows] == [["base", ""], ["hml", "0.001"]] and "domain loss" not in first.head
    assert [row[first.head.index("piqa")] for row in first.rows] == ["0.500", "0.750"]
    assert "What variants of base learned and forgot" in write_report(tmp_path, one).read_text()
    assert one.variants[0].learned is None and json.dumps(as_json(one, tmp_path), allow_nan=False)
