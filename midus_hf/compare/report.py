"""The report of a comparison: a table, a picture, and JSON; and the table of a plan."""

import importlib.util
import math
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
    loss_decreases,
    short_count,
    spread,
    verdict,
)
from midus_hf.compare.plan import Comparison, Variant, rate_name
from midus_hf.compare.run import Result, read_result, window_keys
from midus_hf.compare.running import count_runs, runs_of
from midus_hf.config.options import finite_number
from midus_hf.files.outputs import atomic_write, write_text
from midus_hf.look.page import TextTable, as_png, new_figure

# In order of preference: reports show a task's first.
_METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")
# Keys of `midus train` whose product is a run's number of sequences, with their defaults.
_SIZES = {"max_steps": -1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}


def with_spread(numbers: Spread | None, form: str = "{:+.4f}", interval: bool = False) -> str:
    """Return a mean as text, with ± the standard deviation over seeds, or half of the 95 % interval."""
    if numbers is None:
        return ""
    width = numbers.half_interval if interval else numbers.deviation
    text = form.format(numbers.mean)
    return text if width is None else f"{text} ± {form.format(width).lstrip('+')}"


def variants_table(findings: Findings) -> TextTable:
    """Return the table: the base, then variants by domain loss at their rates, with their null controls."""
    comparison = findings.comparison
    rows = [{"variant": "base", **_task_cells(comparison, [findings.base])}]
    for one in findings.variants:
        rows.append(
            {
                "variant": one.name,
                "rate": one.rate.replace(",", ", "),
                "seeds": str(len(one.results)),
                "trained": short_count(one.results[0].trained_parameters),
                "learned": with_spread(one.learned),
                "forgotten": with_spread(one.forgotten),
                "time": f"{statistics.fmean(result.seconds for result in one.results):.0f} s",
                "GB": f"{max(result.peak_memory_bytes for result in one.results) / 1e9:.2f}",
                **_task_cells(comparison, one.results),
            }
        )
        for control, lower in one.advantages.items():
            cell = f"{verdict(lower)}: {with_spread(lower, interval=True)}"
            rows.append({"variant": f"+{control}", "seeds": str(lower.count), "learned": cell})
    head = ["variant", "rate", "seeds", "trained", *["learned"] * bool(comparison.domain)]
    head += ["forgotten"] * bool(comparison.retention)
    head += [*([] if comparison.tasks is None else comparison.tasks.names), "time", "GB"]
    title = "What each variant learned and forgot" + ", in nats per token" * bool(comparison.texts)
    return TextTable(title, head, [[row.get(column, "") for column in head] for row in rows])


def _task_cells(comparison: Comparison, results: Sequence[Result]) -> dict[str, str]:
    cells = {}
    for task in [] if comparison.tasks is None else comparison.tasks.names:
        known = [metric for one in results if (metric := metric_of(one.tasks.get(task, {}))) is not None]
        cells[task] = with_spread(spread(known), "{:.3f}") if len(known) == len(results) else ""
    return cells


def metric_of(metrics: Mapping[str, float]) -> float | None:
    """Return the metric of a task that reports show, the first of `_METRICS`; None if it has none."""
    # If a metric has several filters, the first counts.
    by_metric = {name.partition(",")[0]: value for name, value in reversed(list(metrics.items()))}
    return next((by_metric[name] for name in _METRICS if name in by_metric), None)


def draw(findings: Findings) -> bytes:
    """Draw learning against forgetting as PNG, a path of means per variant, or only its end."""
    comparison, figure = findings.comparison, new_figure(9.0, 5.5)
    axes = figure.subplots()
    for number, one in enumerate(findings.variants):
        first = -1 if any(result.starts_elsewhere for result in one.results) else 0
        paths = []
        for texts, sign in ((comparison.domain, 1), (comparison.retention, -1)):
            curves = [loss_decreases(result, findings.base, list(texts)) for result in one.results]
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
    """Return a record per variant: size, its runs and its null controls', all tokens, and runs done."""
    records = []
    for variant in variants:
        own, controls = count_runs(variant, comparison)
        sizes = [finite_number(variant.train.get(name, default)) for name, default in _SIZES.items()]
        known = [size for size in sizes if size is not None and size >= 0]
        tokens = int(math.prod(known)) * window_keys(variant.train)["sequence_length"] * (own + controls)
        runs = [run for kind in runs_of([variant], comparison) for run in kind]
        method = "LoRA" if variant.train.get("adapters") else "the base"
        records.append(
            {
                "variant": variant.name,
                "method": method if variant.upscale is None else variant.upscale["method"],
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_name(rate) for rate in variant.rates],
                "runs": own + controls,
                "null_controls": controls,
                "tokens": tokens if len(known) == len(sizes) else None,
                "done": sum(read_result(run.folder(comparison)) is not None for run in runs),
            }
        )
    return records


def plan_table(records: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return the plan as a table, a row per record; numbers that only training knows are empty."""
    rows = []
    for one in records:
        row = {**one, "rates": ", ".join(one["rates"]), "done": f"{one['done']} of {one['runs']}"}
        rows.append(["" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()])
    head = "variant,method,new parameters,trained parameters,rates,runs,of null controls,tokens,done".split(",")
    return TextTable("Each rate with the first seed, the best rate with the others and with null controls", head, rows)


def as_json(findings: Findings, report: Path) -> dict[str, Any]:
    """Return the findings as a JSON object, with all results of variants and their null controls."""
    return {
        **asdict(findings),
        "base_losses": findings.base.losses,
        "reference": None if findings.reference is None else findings.reference.name,
        "differences": {
            name: {"learned": asdict(learned), "forgotten": forgotten and asdict(forgotten)}
            for name, (learned, forgotten) in differences(findings).items()
        },
        "cautions": cautions(findings),
        "advice": advice(findings),
        "report": str(report),
    }


def write_report(root: Path, findings: Findings) -> Path:
    """Write `report.md`, the table with cautions and advice, and return its path.

    Its picture, `frontier.png`, needs matplotlib, and variants that are measured on domain and retention texts.
    """
    comparison, picture, report = findings.comparison, root / "frontier.png", root / "report.md"
    picture.unlink(missing_ok=True)  # of an earlier report
    has_both = findings.variants and comparison.domain and comparison.retention
    if has_both and importlib.util.find_spec("matplotlib") is not None:
        with atomic_write(picture) as partial:
            partial.write_bytes(draw(findings))
    failures = [f"{name} failed: {why}" for name, why in findings.failures.items()]
    sentences = "\n".join(f"- {each}" for each in [*cautions(findings), *failures, *advice(findings)])
    write_text(report, f"{variants_table(findings).markdown()}\n\n{sentences}\n")
    return report
