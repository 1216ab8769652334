"""Findings as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midus_hf.compare.learning import mean_loss, spread
from midus_hf.compare.options import Comparison, rate_name
from midus_hf.compare.report.findings import Findings, VariantFindings, metric_of
from midus_hf.compare.report.sentences import cautions, short_count, with_spread
from midus_hf.compare.results import read_result
from midus_hf.compare.runs import runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import Workplace
from midus_hf.look.page import TableOfWords


def variants_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant learned and forgot at its best rate: the base, then variants by rising domain loss."""
    tasks = list(findings.comparison.tasks.names) if findings.comparison.tasks is not None else []
    columns = ["variant", "rate", "seeds", "new", "trains", "domain loss", "learned"]
    columns += ["forgotten"] if findings.retention else []
    head = [*columns, *findings.retention, *tasks, "seconds", "tokens/s", "memory, GB", "starts at base"]
    of_base = {"variant": "base", "domain loss": f"{mean_loss(findings.base.end, findings.domain):.4f}"}
    first = [of_base.get(column, "") for column in columns]
    first += [f"{findings.base.end.losses[name]:.4f}" for name in findings.retention]
    first += [_share(metric_of(findings.base.tasks.get(task, {}))) for task in tasks] + [""] * 4
    rows = [first, *(_variant_row(variant, findings.retention, tasks) for variant in _by_domain(findings))]
    return TableOfWords("What each learned and forgot", head, rows)


def short_table(findings: Findings) -> TableOfWords:
    """Return the table of variants at their best rates in few columns, for a terminal."""
    rows = [
        [
            variant.name,
            variant.rate,
            short_count(variant.best[0].trained_parameters),
            with_spread(variant.domain_loss),
            *([with_spread(variant.forgotten, "{:+.4f}")] if findings.retention else []),
            f"{spread([result.seconds for result in variant.best]).mean:.0f}",
        ]
        for variant in _by_domain(findings)
    ]
    head = ["variant", "rate", "trains", "domain loss", *(["forgotten"] if findings.retention else []), "seconds"]
    return TableOfWords(f"Base: domain loss {mean_loss(findings.base.end, findings.domain):.4f}", head, rows)


def equal_learning_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant had forgotten when it had learned `Findings.common_learning`, the least first."""
    rows = [[one.variant, one.rate, with_spread(one.forgotten, "{:+.4f}")] for one in findings.at_equal_learning()]
    title = f"Forgotten when {findings.common_learning:.4f} nats were learned"
    return TableOfWords(title, ["variant", "rate", "change of the loss outside the domain"], rows)


def tuned_table(findings: Findings) -> TableOfWords:
    """Return the table of losses and task metrics after fine-tuning, of each variant at its best rate."""
    texts = [*findings.domain, *findings.retention]
    tasks = list(findings.comparison.tasks.names) if findings.comparison.tasks is not None else []
    rows = []
    for variant in _by_domain(findings):
        tuned = [result.tuned for result in variant.best if result.tuned is not None]
        if tuned:
            losses = [with_spread(spread([one.losses[name] for one in tuned])) for name in texts]
            scores = []
            for task in tasks:
                numbers = [number for one in tuned if (number := metric_of(one.tasks.get(task, {}))) is not None]
                scores.append(with_spread(spread(numbers), "{:.3f}") if len(numbers) == len(tuned) else "")
            rows.append([variant.name, variant.rate, *losses, *scores])
    return TableOfWords("After fine-tuning", ["variant", "rate", *texts, *tasks], rows)


def controls_table(findings: Findings) -> TableOfWords:
    """Return the table of variants beside their null controls, which shows what addressing is worth."""
    rows = []
    for variant in findings.variants:
        for one in findings.controls_of(variant):
            half = one.advantage.half_interval
            interval = "" if half is None else f"± {half:.4f}"
            rows.append(
                [
                    variant,
                    one.control,
                    f"{one.advantage.mean:+.4f}",
                    interval,
                    str(one.advantage.count),
                    one.conclusion,
                ]
            )
    head = ["variant", "null control", "nats lower than the null control", "95 % interval", "seeds", ""]
    return TableOfWords("Memories beside their null controls", head, rows)


def failures_table(failures: Mapping[str, str]) -> TableOfWords:
    """Return the table of failed runs, with the reason beside each name."""
    return TableOfWords("Failed", ["run", "why"], [[name, why] for name, why in failures.items()])


def tables(findings: Findings) -> list[TableOfWords]:
    """Return all tables of a report that have rows."""
    all_tables = [variants_table(findings)]
    if findings.compares_forgetting:
        all_tables.append(equal_learning_table(findings))
    all_tables += [tuned_table(findings), controls_table(findings), failures_table(findings.failures)]
    return [table for table in all_tables if table.rows]


def as_markdown(table: TableOfWords) -> str:
    """Return a table in Markdown, with its title above."""
    lines = [f"**{table.title}**", "", _line(table.head), _line(["---"] * len(table.head)), *map(_line, table.rows)]
    return "\n".join(lines)


def as_json(findings: Findings, files: Sequence[Path]) -> dict[str, Any]:
    """Return the findings as a JSON object, for other programs."""
    equal = {one.variant: one for one in findings.at_equal_learning()} if findings.compares_forgetting else {}
    variants = [
        {
            "variant": variant.name,
            "rate": variant.rate,
            "seeds": [result.seed for result in variant.best],
            "new_parameters": variant.best[0].new_parameters,
            "trained_parameters": variant.best[0].trained_parameters,
            "domain_loss": asdict(variant.domain_loss),
            "learned": asdict(variant.learned),
            "forgotten": variant.forgotten and asdict(variant.forgotten),
            "forgotten_at_equal_learning": asdict(equal[variant.name].forgotten) if variant.name in equal else None,
            "controls": {
                one.control: {**asdict(one.advantage), "verdict": one.conclusion}
                for one in findings.controls_of(variant.name)
            },
        }
        for variant in findings.variants.values()
    ]
    return {
        "base": {"losses": dict(findings.base.end.losses), "tasks": findings.base.tasks},
        "common_learning": findings.common_learning if findings.variants else None,
        "variants": variants,
        "cautions": cautions(findings) if findings.variants else [],
        "failed": dict(findings.failures),
        "missing": findings.missing,
        "files": list(map(str, files)),
    }


def _by_domain(findings: Findings) -> list[VariantFindings]:
    return sorted(findings.variants.values(), key=lambda variant: variant.domain_loss.mean)


def _variant_row(variant: VariantFindings, retention: Sequence[str], tasks: Sequence[str]) -> list[str]:
    results = variant.best
    row = [variant.name, variant.rate, str(len(results))]
    row += [short_count(results[0].new_parameters), short_count(results[0].trained_parameters)]
    row += [with_spread(variant.domain_loss), with_spread(variant.learned, "{:+.4f}")]
    row += [with_spread(variant.forgotten, "{:+.4f}")] if retention else []
    row += [with_spread(spread([result.end.losses[name] for result in results])) for name in retention]
    for task in tasks:
        before, after = variant.metric(task, before=True), variant.metric(task)
        row.append("" if before is None or after is None else f"{before.mean:.3f} → {with_spread(after, '{:.3f}')}")
    row.append(f"{spread([result.seconds for result in results]).mean:.0f}")
    speeds = [result.end.tokens / result.seconds for result in results if result.seconds]
    row.append(f"{spread(speeds).mean:,.0f}" if speeds else "")
    row.append(f"{max(result.peak_memory_bytes for result in results) / 1e9:.2f}")
    starts = {result.starts_at_base for result in results}
    row.append("" if starts == {None} else "yes" if starts == {True} else "no")
    return row


def _share(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def planned(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs and how many of them are done, for other programs.

    Runs of null controls are not counted: they are added once their variant has ended.
    """
    workplace = Workplace(Path(comparison.output_dir))
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
                "done": sum(read_result(workplace.run_folder(run)) is not None for run in runs),
            }
        )
    return rows


def plan_table(comparison: Comparison, variants: Sequence[Variant]) -> TableOfWords:
    """Return the plan as a table with a row per variant, with the deviation of trained parameters from the budget in per cent."""
    rows = []
    for variant in planned(comparison, variants):
        trains = (
            "as training says" if variant["trained_parameters"] is None else short_count(variant["trained_parameters"])
        )
        if comparison.trained_parameters is not None and variant["trained_parameters"] is not None:
            trains += f" ({variant['trained_parameters'] / comparison.trained_parameters - 1:+.1%})"
        cells = [
            variant["variant"],
            variant["method"] or "the base",
            variant["fitted"] or "",
            short_count(variant["new_parameters"]),
            trains,
        ]
        rows.append([*cells, ", ".join(variant["rates"]), f"{variant['done']} of {variant['runs']}"])
    seeds = ", ".join(map(str, comparison.seeds))
    return TableOfWords(
        f"Seeds {seeds}; null controls are added as variants end",
        ["variant", "method", "fitted", "new", "trains", "rates", "runs done"],
        rows,
    )
