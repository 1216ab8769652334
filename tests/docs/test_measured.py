"""Tables are what their results say, and other pages repeat only their numbers."""

import csv
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from tiny import json_rows

from experiments.curve import table_rows
from midus_hf.compare.plan import Comparison, rate_name
from midus_hf.compare.report import paired_spread, spread
from midus_hf.compare.run import Result, chosen_rate, read_result
from midus_hf.config.yaml_options import options_from_files

ROOT = Path(__file__).parents[2]
# The runs of each table of what is learned of one text, by what its header begins with.
RUNS = {"| variant | trains |": "smollm2-135m-instruct-short", "| on Gemma-3-270M | trains |": "gemma-3-270m-short"}
# Runs at measured rates by model, and those of the comparison that tried rates.
MEASURED_RUNS = {
    "SmolLM2-135M-Instruct": ("smollm2-135m-instruct-measured", "smollm2-135m-instruct-short"),
    "Gemma-3-270M": ("gemma-3-270m-measured", "gemma-3-270m-short"),
    "Qwen2.5-Coder-1.5B-Instruct": ("qwen2.5-coder-1.5b-instruct-measured",) * 2,
}
CONTROLS_OF = {table.replace("trains", "itself"): table for table in RUNS}
MEASURED = "\n\n".join((ROOT / page).read_text("utf-8") for page in ("docs/results.md", "experiments/learning.md"))
CONTROLS = ("one-row", "random-slots", "frozen-addresses")
# What a page says next to a link to the tables.
OTHERS = {page: page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
STATED = [
    (page, paragraph)
    for page, text in OTHERS.items()
    for paragraph in re.split(r"\n(?=- )|\n\n", text)
    if re.search(r"\b(?:results|learning)\.md[#)]", paragraph) and not paragraph.startswith("|")
]


@cache
def results_in(folder: str) -> list[Result]:
    runs = ROOT / "experiments" / "results" / folder / "runs"
    found = [read_result(path.with_suffix("")) for path in sorted(runs.rglob("seed-*.json"))]
    return [one for one in found if one is not None]


def results(table: str) -> list[Result]:
    return results_in(RUNS[table])


def chosen(table: str, variant: str) -> dict[int, Result]:
    """Return the runs of a variant by seed, at the rate that the validation text chose with seed 0."""
    own = [one for one in results(table) if one.variant == variant]
    rate = chosen_rate([one for one in own if one.seed == 0], ["other_addresses"])
    return {one.seed: one for one in own if one.rate == rate}


def fall(result: Result, text: str) -> float:
    return result.start.losses[text] - result.losses[text]


def with_spread(number, sign: str = "") -> str:
    return f"{number.mean:{sign}.4f} ± {number.deviation:.4f}"


def table_cells(heading: str) -> list[list[str]]:
    table = MEASURED[MEASURED.index(heading) :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("table", RUNS)
def test_learning_table_is_what_the_results_say(table):
    variants = {one.variant for one in results(table) if one.control is None}
    lora, expected = {seed: fall(one, "addresses") for seed, one in chosen(table, "lora").items()}, []
    for name in variants:
        runs = chosen(table, name)
        assert sorted(runs) == [0, 1, 2]
        learned = {seed: fall(one, "addresses") for seed, one in runs.items()}
        rate = list(runs[0].rate.values())[-1]
        cells = [name, f"{runs[0].trained_parameters / 1e6:.1f} M", f"{rate:g}"]
        cells += [
            with_spread(spread([*learned.values()])),
            "" if name == "lora" else with_spread(paired_spread(lora, learned), "+"),
        ]
        expected.append([*cells, with_spread(spread([-fall(one, "articles") for one in runs.values()]), "+")])
    assert table_cells(table) == sorted(expected, key=lambda row: float(row[3].partition(" ")[0]), reverse=True)


def best_tried(tried: str, one: Result) -> Result | None:
    """The run of a variant and seed that learned most, of the rates that were given; None if none were."""
    given = [each for each in results_in(tried) if not each.measured_rates]
    others = [each for each in given if (each.variant, each.seed) == (one.variant, one.seed)]
    return max(others, key=lambda each: fall(each, "addresses"), default=None)


def test_table_of_measured_rates_is_what_the_results_say():
    expected = []
    for model, (measured, tried) in MEASURED_RUNS.items():
        rows = []
        runs = {(one.variant, one.seed): one for one in results_in(measured) if one.measured_rates}
        for (variant, seed), one in runs.items():
            if seed != 0:
                continue
            best = best_tried(tried, one)
            learned, known = fall(one, "addresses"), fall(best, "addresses")
            rates = ", ".join(f"{rate:g}" for rate in one.measured_rates.values())
            changes = [f"{-fall(each, 'articles'):+.3f}" for each in (one, best)]
            second = "not run"
            again = runs.get((variant, 1))
            if again is not None and (best_again := best_tried(tried, again)) is not None:
                second = f"{fall(again, 'addresses') / fall(best_again, 'addresses'):.0%}"
            cells = [variant, rates, f"{learned:.3f}", f"{known:.3f}", f"{learned / known:.0%}", second]
            rows.append([*cells, *changes])
        rows.sort(key=lambda row: int(row[4].strip("%")), reverse=True)
        expected += [[model if number == 0 else "", *row] for number, row in enumerate(rows)]
    assert table_cells("| model | variant | rates of the run |") == expected


def test_curve_table_is_what_the_results_say():
    recipe = ROOT / "configs" / "compare" / "smollm2-135m-instruct-curve.yaml"
    runs = ROOT / "experiments" / "results" / recipe.stem / "runs"
    found = [read_result(path.with_suffix("")) for path in sorted(runs.rglob("seed-*.json"))]
    assert len({(one.origin["data"], one.origin["base"]) for one in found}) == 1
    texts = ("domain.addresses", "domain.glosses", "validation.mixed", "retention.articles")
    comparison = options_from_files(Comparison, [recipe], ["base=BASE", *(f"{text}=TEXT" for text in texts)])
    heading, *rows = table_rows(comparison, found)
    assert table_cells(f"| {' | '.join(heading)} |") == rows


@pytest.mark.parametrize("table", CONTROLS_OF)
def test_controls_table_is_what_the_results_say(table):
    found = [one for one in results(CONTROLS_OF[table]) if one.control is not None]
    controls, rows = {(one.control_of, one.control, rate_name(one.rate)): one for one in found}, table_cells(table)
    assert {row[0] for row in rows} == {variant for variant, _, _ in controls}
    for name, *cells in rows:
        itself = chosen(CONTROLS_OF[table], name)[0]
        runs = [itself, *(controls.get((name, control, rate_name(itself.rate))) for control in CONTROLS)]
        assert cells == ["not kept" if one is None else f"{fall(one, 'addresses'):.3f}" for one in runs]


def test_second_model_row_is_what_the_run_says():
    run = ROOT / "experiments/results/gemma-3-270m-stages/hier-ffn.jsonl"
    *_, end, _ = json_rows(run)
    *gained, articles = end["gains"].values()
    (row,) = (row for row in table_cells("| variant | rate | gained |") if "on Gemma-3-270M" in row[0])
    numbers = [sum(gained) / len(gained), end["backward_transfer"]]
    assert row[2:] == [*(f"{each:.3f}".removesuffix(".000") for each in numbers), f"{-articles:+.3f}"]


def test_base_kl_table_is_what_the_results_say():
    with (ROOT / "experiments" / "results" / "base_kl.csv").open(encoding="utf-8", newline="") as file:
        base, *rows = csv.DictReader(file)
    runs: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        runs[row["variant"], row["rate"], row["base_kl"]].append(row)
    expected = []
    for (variant, rate, weight), own in runs.items():
        assert sorted(row["seed"] for row in own) == [str(seed) for seed in range(len(own))]
        texts = ("addresses", "articles", "countries")
        changes = [[float(row[text]) - float(base[text]) for row in own] for text in texts]
        cells = [[-fall for fall in changes[0]], *changes[1:]]
        spreads = [with_spread(spread(each), "+") if len(own) > 1 else f"{each[0]:+.4f}" for each in cells]
        spreads[0] = spreads[0].replace("+", "", 1)
        expected.append([variant, rate, f"{float(weight):g}", str(len(own)), *spreads])
    assert sorted(table_cells("| variant | rate | `base_kl` |")) == sorted(expected)


@pytest.mark.parametrize(("page", "paragraph"), STATED, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(STATED)])
def test_pages_repeat_only_numbers_of_the_tables(page, paragraph):
    """What follows a link to the log is the log's."""
    stated = re.findall(r"(?<![\d.])0\.\d+", paragraph.partition("LOG.md")[0])
    known = [float(number) for number in re.findall(r"0\.\d+", MEASURED)]
    assert [one for one in stated if float(one) not in {round(number, len(one) - 2) for number in known}] == []


MODELS = ("base", "base, text in front", "packs", "packs, name in front")
HEADER = " | base | text in front | packs | packs, name in front |"


def counts_of(page: Path, heading: str) -> list[list[int]]:
    text = page.read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0].splitlines()
    names = [cell.strip() in ("of", *HEADER.strip(" |").split(" | ")) for cell in table[0].split("|")]
    return [[int(cell) for cell, counts in zip(line.split("|"), names, strict=True) if counts] for line in table[2:]]


def answers(kind: str) -> list[dict]:
    return json_rows(ROOT / "experiments" / "results" / "smollm2-135m-instruct-facts" / f"{kind}.jsonl")


UNDER = f"|{HEADER}\n|---|---|---|---|---|\n| "
ELEMENTS = ("name last", "place", "element number", "protons", "behind a paragraph", "symbol", "weight")
TALKS = ("second question", "linked number", "linked name", "two at once", "something else afterwards")
BELIEFS = (
    "followed", "likelier", "other wordings", "likelier, other wordings", "negation", "neighbours", "other facts",
)  # fmt: skip
SMALL, LARGE = (f"../qwen2.5-coder-{size}-instruct-facts/" for size in ("0.5b", "1.5b"))


@pytest.mark.parametrize(("kind", "heading", "columns"), [
    ("elements", f"| of 40{HEADER}", (*ELEMENTS, "number in a chat", "protons in a chat")),
    ("../gemma-3-270m-facts/elements", f"| of 20{HEADER}", ELEMENTS),
    ("conversations", f"| SmolLM2, of 16{HEADER}", TALKS),
    (f"{SMALL}conversations", f"| Qwen2.5-Coder-0.5B, of 16{HEADER}", TALKS),
    (f"{LARGE}conversations", f"| Qwen2.5-Coder-1.5B, of 16{HEADER}", TALKS),
    (f"{LARGE}code", f"| Qwen2.5-Coder-1.5B, of 12{HEADER}", ("fact", "line of code")),
    ("uneven", f"{UNDER}in a chat", ("in a chat", "alone")),
    ("uneven-2", f"{UNDER}are right in a chat", ("in a chat", "alone")),
    ("beliefs", f"{UNDER}followed", BELIEFS),
])  # fmt: skip
def test_packs_tables_are_what_the_results_say(kind, heading, columns):
    cells = counts_of(ROOT / "experiments" / "packs.md", heading)
    for at, model in enumerate(MODELS):
        lines = [line.get("counts", line.get("right")) for line in answers(kind) if line["model"] == model]
        assert lines, at
        assert all([line[column][0] for column in columns] == [row[at] for row in cells] for line in lines)


def test_packs_page_table_is_what_the_results_say():
    cells = counts_of(ROOT / "docs" / "methods" / "packs.md", "| right | of |")
    shown = [
        *(("elements", column) for column in ("number in a chat", "protons in a chat", "name last")),
        *(("conversations", column) for column in ("second question", "linked number", "linked name", "two at once")),
        *((kind, "in a chat") for kind in ("uneven", "uneven-2")),
    ]
    for (kind, column), row in zip(shown, cells, strict=True):
        found = {line["model"]: line["right"][column] for line in answers(kind) if line["model"] in MODELS}
        assert [found[model] for model in MODELS] == [[count, row[0]] for count in row[1:]]
