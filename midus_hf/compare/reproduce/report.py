"""Reports of a reproduced table, with the paper's numbers below ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.report.sentences import with_spread
from midus_hf.compare.report.tables import as_markdown, failures_table
from midus_hf.compare.reproduce.table import AVERAGE, Stage, Table, variant_name
from midus_hf.compare.results import Result
from midus_hf.look.page import Section, TableOfWords, write_page

_STAGES: dict[Stage, str] = {"continued": "after continual pretraining", "tuned": "after fine-tuning"}


def stage_table(
    table: Table, stage: Stage, results: Mapping[str, Sequence[Result]], failures: Mapping[str, str]
) -> TableOfWords:
    """Return the table of a stage: a row of our numbers, followed by a row of the paper's."""
    rows = []
    for name, row in table.options.rows.items():
        variant = variant_name(name)
        if variant not in results:
            continue
        of_row = results[variant]
        ours = [with_spread(table.spread(column, stage, of_row), "{:.2f}") or "-" for column in table.options.columns]
        printed = row.continued if stage == "continued" else row.tuned or [None] * len(table.options.columns)
        failed = any(run.startswith(f"{variant}/") for run in failures)
        state = "failed" if failed else str(len(of_row) or "not done")
        rows += [
            [name, *ours, state],
            ["paper", *("-" if number is None else f"{number:.2f}" for number in printed), ""],
        ]
    return TableOfWords(f"{table.options.title}: {_STAGES[stage]}", ["", *table.options.columns, "seeds"], rows)


def as_json(table: Table, results: Mapping[str, Sequence[Result]], failures: Mapping[str, str]) -> dict[str, Any]:
    """Return all numbers of a table as a JSON object, for other programs."""
    rows = []
    for name, row in table.options.rows.items():
        of_row = results.get(variant_name(name), [])
        entry: dict[str, Any] = {"row": name, "seeds": [result.seed for result in of_row]}
        for stage in table.options.stages:
            spreads = {column: table.spread(column, stage, of_row) for column in table.options.columns}
            printed = row.continued if stage == "continued" else row.tuned
            entry[stage] = {
                column: {
                    "mean": None if one is None else one.mean,
                    "deviation": None if one is None else one.deviation,
                    "paper": None if printed is None else printed[number],
                }
                for number, (column, one) in enumerate(spreads.items())
            }
        rows.append(entry)
    return {
        "paper": table.paper,
        "table": table.name,
        "scale": table.scale_name,
        "rows": rows,
        "failed": dict(failures),
    }


def write_table(
    root: Path, table: Table, results: Mapping[str, Sequence[Result]], failures: Mapping[str, str]
) -> list[Path]:
    """Write `table.md` and `table.html`."""
    title = f"{table.paper}, table {table.name}, at the scale {table.scale_name}"
    tables = [stage_table(table, stage, results, failures) for stage in table.options.stages]
    if failures:
        tables.append(failures_table(failures))
    notes = [f"{table.options.title}. {table.scale.needs}", *_left_out(table)]
    markdown, page = root / "table.md", root / "table.html"
    markdown.write_text("\n\n".join([f"# {title}", *notes, *map(as_markdown, tables)]) + "\n", encoding="utf-8")
    write_page(page, title, [Section("", notes, tables)])
    return [markdown, page]


def _left_out(table: Table) -> list[str]:
    """Return a sentence that names the columns that the scale does not measure; no sentence if there are none."""
    missing = [column for column in table.options.columns if column not in table.scale.columns and column != AVERAGE]
    return [f"Not measured at this scale: {', '.join(missing)}."] if missing else []
