"""The report of a comparison: one table, a picture, a page, and numbers for other programs; and the table of a plan."""

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midus_hf.compare.findings import (
    Findings,
    Spread,
    advice,
    cautions,
    differences,
    short_count,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison, rate_name
from midus_hf.compare.running import count_runs, runs_of
from midus_hf.compare.runs import Result, Variant
from midus_hf.files.outputs import atomic_write
from midus_hf.look.page import Section, TextTable, as_png, new_figure, write_page

# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")
_HOW_TO_READ = (
    "Losses are nats per token of held-out text, each text counting alike, on packed sequences whose first tokens are not "
    "predicted. ± is the standard deviation over seeds, in rows of null controls half of a 95 % interval; neither covers other "
    "texts. Learned is the decrease of the loss of the domain, forgotten the increase of the loss outside it, from the run's "
    "start, or from the base if the upscaled model was not verified to compute the same. Each variant is reported at the rate with "
    "which its first seed ended lowest on the validation texts, which are part of no other number. A null control, named after a +, "
    "is the same memory with its addressing taken away, trained at the variant's rate, which need not be the control's best one; its "
    "row says whether the variant beats it, and by how much."
)


def with_spread(numbers: Spread | None, form: str = "{:.4f}", interval: bool = False) -> str:
    """Return a mean as text, followed by ± and the standard deviation over several seeds, or half of the mean's 95 % interval."""
    if numbers is None:
        return ""
    width = numbers.half_interval if interval else numbers.deviation
    text = form.format(numbers.mean)
    return text if width is None else f"{text} ± {form.format(width).lstrip('+')}"


def variants_table(findings: Findings) -> TextTable:
    """Return the table: the base, then variants by increasing domain loss at their rates, each followed by its null controls."""
    comparison = findings.comparison
    rows = [{"variant": "base", **_task_cells(comparison, [findings.base])}]
    for one in findings.variants:
        rows.append(
            {
                "variant": one.name,
                "rate": one.rate.replace(",", ", "),
                "seeds": str(len(one.results)),
                "trained": short_count(one.results[0].trained_parameters),
                "learned": with_spread(one.learned, "{:+.4f}"),
                "forgotten": with_spread(one.forgotten, "{:+.4f}"),
                "time": f"{statistics.fmean(result.seconds for result in one.results):.0f} s",
                "GB": f"{max(result.peak_memory_bytes for result in one.results) / 1e9:.2f}",
                **_task_cells(comparison, one.results),
            }
        )
        for control, lower in one.advantages.items():
            cell = f"{verdict(lower)}: {with_spread(lower, '{:+.4f}', interval=True)}"
            rows.append({"variant": f"+{control}", "seeds": str(lower.count), "learned": cell})
    head = ["variant", "rate", "seeds", "trained", *["learned"] * bool(comparison.domain)]
    head += ["forgotten"] * bool(comparison.retention)
    head += [*([] if comparison.tasks is None else comparison.tasks.names), "time", "GB"]
    title = "What each variant learned and forgot" + ", in nats per token" * bool(comparison.texts)
    return TextTable(title, head, [[row.get(column, "") for column in head] for row in rows])


def _task_cells(comparison: Comparison, results: Sequence[Result]) -> dict[str, str]:
    """Return the cells of tasks, from one result per seed; a task that a seed lacks has an empty cell."""
    cells = {}
    for task in [] if comparison.tasks is None else comparison.tasks.names:
        metrics = [metric_of(one.tasks.get(task, {})) for one in results]
        known = [metric for metric in metrics if metric is not None]
        cells[task] = with_spread(spread(known), "{:.3f}") if len(known) == len(metrics) else ""
    return cells


def metric_of(metrics: Mapping[str, float]) -> float | None:
    """Return the metric of a task that reports show, the first of `_METRICS` that it has; None if it has none."""
    # If a metric has several filters, the first counts.
    by_metric = {name.partition(",")[0]: value for name, value in reversed(list(metrics.items()))}
    return next((by_metric[name] for name in _METRICS if name in by_metric), None)


def draw(findings: Findings) -> bytes:
    """Draw learning against forgetting, a path of mean losses per variant with deviations at its end, as PNG.

    For variants that do not start at the base, only the end is drawn.
    """
    comparison, figure = findings.comparison, new_figure(9.0, 5.5)
    axes = figure.subplots()
    for number, one in enumerate(findings.variants):
        first = -1 if any(result.starts_elsewhere for result in one.results) else 0
        paths = []
        for texts, sign in ((comparison.domain, 1), (comparison.retention, -1)):
            curves = [findings.loss_decreases(result, list(texts)) for result in one.results]
            paths.append([sign * statistics.fmean(point) for point in zip(*curves, strict=True)][first:])
        (xs, ys), color = paths, f"C{number % 10}"
        axes.plot(xs, ys, color=color, linestyle="-" if number < 10 else "--", label=one.name)
        assert one.learned is not None and one.forgotten is not None, "there are texts of both kinds"
        deviations = {"xerr": one.learned.deviation, "yerr": one.forgotten.deviation}
        axes.errorbar(xs[-1], ys[-1], **deviations, fmt="o", capsize=3, color=color)
    axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
    axes.set(xlabel="learned (nats per token)", ylabel="forgotten (nats per token)")
    axes.set_title("means over seeds, at the end ± one standard deviation", fontsize=9, loc="left")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def plan_records(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant: its size, its runs and those of its null controls, the tokens of all, and how many are done."""
    records = []
    for variant in variants:
        own, controls = count_runs(variant, comparison)
        runs = [run for kind in runs_of([variant], comparison) for run in kind]
        method = variant.upscale["method"] if variant.upscale is not None else None
        records.append(
            {
                "variant": variant.name,
                "method": method or ("LoRA" if variant.train.get("adapters") else "the base"),
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_name(rate) for rate in variant.rates],
                "runs": own + controls,
                "null_controls": controls,
                "tokens": None if variant.tokens is None else variant.tokens * (own + controls),
                "done": sum(run.result(comparison) is not None for run in runs),
            }
        )
    return records


def plan_table(records: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return the plan of a comparison as a table, a row per record; numbers that only training knows are empty."""
    rows = []
    for one in records:
        row = {**one, "rates": ", ".join(one["rates"]), "done": f"{one['done']} of {one['runs']}"}
        rows.append(["" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()])
    head = [
        "variant",
        "method",
        "new parameters",
        "trained parameters",
        "rates",
        "runs",
        "of null controls",
        "tokens",
        "done",
    ]
    return TextTable("Each rate with the first seed, the best rate with the others and with null controls", head, rows)


def as_json(findings: Findings, page: Path) -> dict[str, Any]:
    """Return the findings as a JSON object, for other programs, with all results of variants and their null controls."""
    return {
        **asdict(findings),
        "reference": None if findings.reference is None else findings.reference.name,
        "differences": {
            name: {"learned": asdict(learned), "forgotten": forgotten and asdict(forgotten)}
            for name, (learned, forgotten) in differences(findings).items()
        },
        "cautions": cautions(findings),
        "advice": advice(findings),
        "page": str(page),
    }


def write_report(root: Path, findings: Findings) -> Path:
    """Write `report.html`, a self-contained page, and return its path.

    Its picture, also written as `frontier.png`, needs matplotlib, and variants that are measured on domain and retention texts.
    """
    comparison, pictures = findings.comparison, {}
    picture = root / "frontier.png"
    picture.unlink(missing_ok=True)  # of an earlier report
    has_both = findings.variants and comparison.domain and comparison.retention
    if has_both and importlib.util.find_spec("matplotlib") is not None:
        pictures["Learned and forgotten"] = draw(findings)
        with atomic_write(picture) as partial:
            partial.write_bytes(pictures["Learned and forgotten"])
    failures = [f"{name} failed: {why}" for name, why in findings.failures.items()]
    sections = [
        Section("", [*advice(findings), *cautions(findings), *failures], pictures=pictures),
        Section("", tables=[variants_table(findings)]),
        Section("How to read this", [_HOW_TO_READ]),
    ]
    page = root / "report.html"
    write_page(page, f"What variants of {Path(comparison.base).name} learned and forgot", sections)
    return page
