"""Findings, and the plan of a comparison, as tables and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midus_hf.compare.learning import mean_loss, spread
from midus_hf.compare.options import Comparison, rate_name
from midus_hf.compare.report.findings import Findings, VariantFindings, metric_of, paper_number
from midus_hf.compare.report.sentences import cautions, short_count, with_spread
from midus_hf.compare.results import Result, read_result
from midus_hf.compare.runs import runs_of
from midus_hf.compare.variants import Variant
from midus_hf.look.page import TableOfWords

# Columns of the table of variants that a terminal shows.
_SHORT = ("variant", "rate", "trains", "domain loss", "forgotten", "seconds")
_STAGES = {"trained": "after training", "tuned": "after fine-tuning"}


def variants_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant learned and forgot at its best rate: the base, then variants by rising domain loss."""
    base = {"variant": "base"}
    if findings.domain:
        base["domain loss"] = f"{mean_loss(findings.base.end, findings.domain):.4f}"
    base |= {name: f"{findings.base.end.losses[name]:.4f}" for name in findings.retention}
    base |= {task: _share(findings.base.tasks, task) for task in findings.tasks}
    rows = [_variant_row(variant, findings) for variant in findings.ranked]
    head = ["variant", "rate", "seeds", "new", "trains", *(["domain loss", "learned"] if findings.domain else [])]
    head += [*(["forgotten"] if findings.retention else []), *findings.retention, *findings.tasks]
    head += ["seconds", "tokens/s", "memory, GB", "starts at base"]
    return TableOfWords(
        "What each learned and forgot", head, [[row.get(column, "") for column in head] for row in (base, *rows)]
    )


def _variant_row(variant: VariantFindings, findings: Findings) -> dict[str, str]:
    """Return the cells of a variant by the heads of their columns."""
    results = variant.best
    row = {"variant": variant.name, "rate": variant.rate, "seeds": str(len(results))}
    row |= {"new": short_count(results[0].new_parameters), "trains": short_count(results[0].trained_parameters)}
    if findings.domain:
        row |= {"domain loss": with_spread(variant.domain_loss), "learned": with_spread(variant.learned, "{:+.4f}")}
    row["forgotten"] = with_spread(variant.forgotten, "{:+.4f}")
    row |= {name: with_spread(spread([one.end.losses[name] for one in results])) for name in findings.retention}
    for task in findings.tasks:
        before, after = (
            _scores([one.tasks_before for one in results], task),
            _scores([one.tasks for one in results], task),
        )
        row[task] = (
            f"{statistics.fmean(before):.3f} → {with_spread(spread(after), '{:.3f}')}" if before and after else ""
        )
    row["seconds"] = f"{statistics.fmean(one.seconds for one in results):.0f}"
    speeds = [one.tokens / one.seconds for one in results if one.seconds]
    row["tokens/s"] = f"{statistics.fmean(speeds):,.0f}" if speeds else ""
    row["memory, GB"] = f"{max(one.peak_memory_bytes for one in results) / 1e9:.2f}"
    starts = {one.starts_at_base for one in results}
    row["starts at base"] = "" if starts == {None} else "yes" if starts == {True} else "no"
    return row


def short_table(findings: Findings) -> TableOfWords:
    """Return the table of variants in the columns that a terminal has room for."""
    title, head, rows = variants_table(findings)
    shown = [number for number, name in enumerate(head) if name in _SHORT]
    return TableOfWords(title, [head[number] for number in shown], [[row[number] for number in shown] for row in rows])


def tuned_table(findings: Findings) -> TableOfWords:
    """Return the table of losses and task metrics after fine-tuning, of each variant at its best rate."""
    texts = [*findings.domain, *findings.retention]
    rows = []
    for variant in findings.ranked:
        tuned = [result.tuned for result in variant.best if result.tuned is not None]
        if tuned:
            losses = [with_spread(spread([one.losses[name] for one in tuned])) for name in texts]
            scores = [_scores([one.tasks for one in tuned], task) for task in findings.tasks]
            rows.append(
                [
                    variant.name,
                    variant.rate,
                    *losses,
                    *(with_spread(spread(one), "{:.3f}") if one else "" for one in scores),
                ]
            )
    return TableOfWords("After fine-tuning", ["variant", "rate", *texts, *findings.tasks], rows)


def paper_tables(findings: Findings) -> list[TableOfWords]:
    """Return the tables of a paper, one per stage: a row of our numbers, followed by a row of the paper's."""
    paper = findings.comparison.paper
    if paper is None:
        return []
    tables = []
    for stage, when in _STAGES.items():
        rows = []
        for name, printed in getattr(paper, stage).items():
            if name in findings.variants:
                results = findings.variants[name].best
                ours = [_paper_cell(findings, column, results, stage == "tuned") for column in paper.columns]
                theirs = ["-" if number is None else f"{number:.2f}" for number in printed]
                rows += [[name, *ours, str(len(results))], ["paper", *theirs, ""]]
        tables.append(TableOfWords(f"{paper.title}: {when}", ["", *paper.columns, "seeds"], rows))
    return tables


def _paper_cell(findings: Findings, column: str, results: Sequence[Result], tuned: bool) -> str:
    """Return the mean and spread of a column over the seeds that have a number; `-` if no seed has."""
    paper = findings.comparison.paper
    assert paper is not None
    numbers = [number for one in results if (number := paper_number(paper, column, one, tuned)) is not None]
    return with_spread(spread(numbers), "{:.2f}") if numbers else "-"


def controls_table(findings: Findings) -> TableOfWords:
    """Return the table of variants beside their null controls, which shows what addressing is worth."""
    rows = []
    for variant in findings.variants:
        for one in findings.verdicts(variant):
            advantage = one.advantage
            interval = "" if advantage.half_interval is None else f"± {advantage.half_interval:.4f}"
            numbers = [f"{advantage.mean:+.4f}", interval, str(advantage.count)]
            rows.append([variant, one.control, *numbers, one.conclusion])
    head = ["variant", "null control", "nats lower than the null control", "95 % interval", "seeds", ""]
    return TableOfWords("Memories beside their null controls", head, rows)


def tables(findings: Findings) -> list[TableOfWords]:
    """Return all tables of a report that have rows."""
    failed = TableOfWords("Failed", ["run", "why"], [[name, why] for name, why in findings.failures.items()])
    all_tables = [
        variants_table(findings),
        tuned_table(findings),
        *paper_tables(findings),
        controls_table(findings),
        failed,
    ]
    return [table for table in all_tables if table.rows]


def as_markdown(table: TableOfWords) -> str:
    """Return a table in Markdown, with its title above."""
    lines = [f"**{table.title}**", "", _line(table.head), _line(["---"] * len(table.head)), *map(_line, table.rows)]
    return "\n".join(lines)


def as_json(findings: Findings, files: Sequence[Path]) -> dict[str, Any]:
    """Return the findings as a JSON object, for other programs."""
    variants = [
        {
            "variant": variant.name,
            "rate": variant.rate,
            "seeds": [result.seed for result in variant.best],
            "new_parameters": variant.best[0].new_parameters,
            "trained_parameters": variant.best[0].trained_parameters,
            "domain_loss": asdict(variant.domain_loss) if findings.domain else None,
            "learned": asdict(variant.learned) if findings.domain else None,
            "forgotten": variant.forgotten and asdict(variant.forgotten),
            "controls": {
                one.control: {**asdict(one.advantage), "verdict": one.conclusion}
                for one in findings.verdicts(variant.name)
            },
        }
        for variant in findings.variants.values()
    ]
    return {
        "base": {"losses": dict(findings.base.end.losses), "tasks": findings.base.tasks},
        "variants": variants,
        "paper": [table._asdict() for table in paper_tables(findings)],
        "cautions": cautions(findings) if findings.variants else [],
        "failed": dict(findings.failures),
        "missing": findings.missing,
        "files": list(map(str, files)),
    }


def planned(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs and how many of them are done, for other programs.

    Runs of null controls are not counted: they are added once all variants have ended.
    """
    rows = []
    for variant in variants:
        runs = runs_of(variant, comparison)
        rows.append(
            {
                "variant": variant.name,
                "method": None if variant.upscale is None else variant.upscale["method"],
                "fitted": variant.fitted,
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_name(rate) for rate in variant.rates],
                "runs": len(runs),
                "done": sum(read_result(run.folder(comparison)) is not None for run in runs),
            }
        )
    return rows


def plan_table(comparison: Comparison, variants: Sequence[Variant]) -> TableOfWords:
    """Return the plan as a table with a row per variant, with the deviation of trained parameters from the budget in per cent."""
    rows = []
    for variant in planned(comparison, variants):
        trained = variant["trained_parameters"]
        trains = "as training says" if trained is None else short_count(trained)
        if comparison.trained_parameters is not None and trained is not None:
            trains += f" ({trained / comparison.trained_parameters - 1:+.1%})"
        cells = [variant["variant"], variant["method"] or "the base", variant["fitted"] or ""]
        cells += [short_count(variant["new_parameters"]), trains, ", ".join(variant["rates"])]
        rows.append([*cells, f"{variant['done']} of {variant['runs']}"])
    title = f"Seeds {', '.join(map(str, comparison.seeds))}; null controls are added at the end"
    return TableOfWords(title, ["variant", "method", "fitted", "new", "trains", "rates", "runs done"], rows)


def _scores(tasks: Sequence[Mapping[str, Mapping[str, float]]], task: str) -> list[float]:
    """Return the metric of a task for each seed; an empty list if any seed lacks the metric."""
    numbers = [metric_of(one.get(task, {})) for one in tasks]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else []


def _share(tasks: Mapping[str, Mapping[str, float]], task: str) -> str:
    number = metric_of(tasks.get(task, {}))
    return "" if number is None else f"{number:.3f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
