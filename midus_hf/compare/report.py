"""The report of a comparison: tables, a picture, one page, and numbers for other programs."""

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from midus_hf.compare.findings import (
    Findings,
    Spread,
    cautions,
    mean_loss,
    paired,
    shared_origin,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison
from midus_hf.compare.running import runs_of
from midus_hf.compare.runs import Point, Result, read_result, tokens_of
from midus_hf.compare.variants import Variant, rate_words
from midus_hf.files.outputs import atomic_write
from midus_hf.look.page import Section, TextTable, as_png, new_figure, write_page
from upscalers.methods.contract import get_method
from upscalers.request import parse_options

# Options of methods that set sizes, which reports include even if they have the default.
_SIZES = ("n", "k", "slots", "chapters", "memory_tokens", "rows", "sizes", "layers")
# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")
_HOW_TO_READ = (
    "Losses are nats per token of held-out text, each text counting alike, on packed sequences whose first tokens are not "
    "predicted. ± is the standard deviation over seeds, or the half of a 95 % interval where a table says so; neither covers "
    "other texts. Learned is the decrease of the loss of the domain, forgotten the increase of the loss outside it, from "
    "the run's start, or from the base if the upscaled model was not verified to compute the same. Each variant is reported "
    "at the rate with which its first seed ended lowest on the validation texts, which are part of no other number. A null "
    "control is the same memory with its addressing taken away, trained at the variant's rate, which need not be the null "
    "control's best one."
)


def with_spread(numbers: Spread | None, form: str = "{:.4f}", interval: bool = False) -> str:
    """Return a mean as text, followed by ± and the standard deviation over several seeds, or half of the mean's 95 % interval."""
    if numbers is None:
        return ""
    width = numbers.half_interval if interval else numbers.deviation
    text = form.format(numbers.mean)
    return text if width is None else f"{text} ± {form.format(width).lstrip('+')}"


def short_count(number: int) -> str:
    """Return a count, 0 or more, as short text of three significant digits: `8.89M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def tables(findings: Findings) -> list[TextTable]:
    """Return all tables of a report that have rows."""
    failed = TextTable("Failed", ["run", "why"], [[name, why] for name, why in findings.failures.items()])
    all_tables = [variants_table(findings), made_table(findings), differences_table(findings)]
    return [table for table in (*all_tables, controls_table(findings), failed) if table.rows]


def variants_table(findings: Findings) -> TextTable:
    """Return the table of what each variant learned and forgot at its rate: the base, then variants by increasing domain loss."""
    comparison = findings.comparison
    base = replace(findings.base, curve=[Point(0, findings.base_losses)])
    rows = [{"variant": "base", **_measured_cells(comparison, [base])}]
    for variant in findings.variants:
        results, request = variant.results, variant.results[0].request
        starts = {one.starts_at_base for one in results}
        row = {
            "variant": variant.name,
            "rate": rate_words(results[0].rate, request.get("train") or {}, request.get("upscale")),
            "seeds": str(len(results)),
            "trained parameters": short_count(results[0].trained_parameters),
            "learned": with_spread(variant.learned, "{:+.4f}"),
            "forgotten": with_spread(variant.forgotten, "{:+.4f}"),
            "seconds": f"{statistics.fmean(one.seconds for one in results):.0f}",
            "peak GB": f"{max(one.peak_memory_bytes for one in results) / 1e9:.2f}",
            "starts at base": "" if starts == {None} else "yes" if starts == {True} else "no",
            "certified": "yes" if variant.is_certified else "",
        }
        rows.append(row | _measured_cells(comparison, results))
    head = ["variant", "rate", "seeds", "trained parameters"]
    head += ["domain loss", "learned"] if comparison.domain else []
    head += ["forgotten"] if comparison.retention else []
    head += [*([] if comparison.tasks is None else comparison.tasks.names), "seconds", "peak GB", "starts at base"]
    head += ["certified"] if any(variant.is_certified for variant in findings.variants) else []
    title = "What each variant learned and forgot" + "; losses in nats per token" * bool(comparison.texts)
    return TextTable(title, head, [[row.get(column, "") for column in head] for row in rows])


def _measured_cells(comparison: Comparison, results: Sequence[Result]) -> dict[str, str]:
    """Return the cells of the domain's loss and of tasks, from one result per seed; a task that a seed lacks has an empty cell."""
    domain = list(comparison.domain)
    cells = {"domain loss": with_spread(spread([mean_loss(one.losses, domain) for one in results if domain]))}
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


def made_table(findings: Findings) -> TextTable:
    """Return the table of how each variant was made: options that its keys name, and defaults of options that set sizes."""
    rows = []
    for variant in findings.variants:
        request = variant.results[0].request
        upscaling, train = request.get("upscale"), request.get("train") or {}
        options, cells = dict(train.get("adapters") or {}), ["", ""]
        if upscaling is not None:
            method, values = get_method(upscaling["method"]), upscaling.get("options") or {}
            recorded = method(parse_options(method.options_class, values, method.name)).options_record
            # An exact table has as many rows as its corpus has n-grams.
            sizes = [key for key in _SIZES if (key, recorded.get("table")) != ("rows", "exact")]
            options = {key: recorded[key] for key in recorded if key in values or key in sizes} | options
            placement = upscaling.get("placement") or method.default_placement or ""
            cells = [str(upscaling.get("num_new_layers") or ""), str(placement)]
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        rows.append([variant.name, _made_by(upscaling, train), *cells, words])
    return TextTable("How each variant was made", ["variant", "method", "new layers", "placement", "options"], rows)


def _made_by(upscaling: Mapping[str, Any] | None, train: Mapping[str, Any]) -> str:
    """Return the method of a variant, or the kind of baseline: LoRA on the base, or the base itself."""
    return str(upscaling["method"]) if upscaling is not None else "LoRA" if train.get("adapters") else "the base"


def controls_table(findings: Findings) -> TextTable:
    """Return the table of variants and their null controls, which shows what addressing contributes."""
    rows = [
        [variant.name, control, with_spread(lower, "{:+.4f}", interval=True), str(lower.count), verdict(lower)]
        for variant in findings.variants
        for control, lower in variant.advantages.items()
    ]
    head = ["variant", "null control", "nats lower than the null control, 95 %", "seeds", ""]
    return TextTable("Memories and their null controls", head, rows)


def differences(findings: Findings) -> dict[str, tuple[Spread, Spread | None]]:
    """Return how much more each variant learned and forgot than the reference, over the seeds that both have."""
    reference, by_variant = findings.reference, {}
    if reference is None:
        return {}
    for variant in findings.variants:
        learned = paired(reference.learned_by_seed, variant.learned_by_seed)
        if variant.name != reference.name and learned is not None:
            by_variant[variant.name] = (learned, paired(reference.forgotten_by_seed, variant.forgotten_by_seed))
    return by_variant


def differences_table(findings: Findings) -> TextTable:
    """Return the table of what each variant learned and forgot beyond the reference, paired by seed."""
    rows = [
        [name, *(with_spread(numbers, "{:+.4f}", interval=True) for numbers in pair), str(pair[0].count)]
        for name, pair in differences(findings).items()
    ]
    name = "" if findings.reference is None else findings.reference.name
    title = f"Difference to {name}, which learned most, paired by seed, with 95 % intervals"
    return TextTable(title, ["variant", "learned", "forgotten", "seeds"], rows)


def draw(findings: Findings) -> bytes:
    """Draw learning against what happened to other texts, a path of mean losses per variant with deviations at its end, as PNG.

    For variants that do not start at the base, only the end is drawn. A ring marks the end of a certified variant.
    """
    import matplotlib

    comparison, figure = findings.comparison, new_figure(9.0, 5.5)
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20" if len(findings.variants) > 10 else "tab10"]
    for number, variant in enumerate(findings.variants):
        falls = [
            [findings.falls(one, list(texts)) for one in variant.results]
            for texts in (comparison.domain, comparison.retention)
        ]
        first = -1 if any(one.starts_elsewhere for one in variant.results) else 0
        xs, ys = ([statistics.fmean(point) for point in zip(*kind, strict=True)][first:] for kind in falls)
        ys = [-fall for fall in ys]
        color = colors(number % colors.N)
        axes.plot(xs, ys, color=color, label=variant.name + ", certified" * variant.is_certified)
        if variant.is_certified:
            axes.scatter(xs[-1], ys[-1], s=160, facecolors="none", edgecolors=color)
        assert variant.learned is not None and variant.forgotten is not None, "there are texts of both kinds"
        deviations = {"xerr": variant.learned.deviation, "yerr": variant.forgotten.deviation}
        axes.errorbar(xs[-1], ys[-1], **deviations, fmt="o", capsize=3, color=color)
    axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
    axes.set(xlabel="learned (nats per token)", ylabel="change of the loss of other text (nats per token)")
    axes.yaxis.set_major_formatter(lambda risen, _: f"{risen:+.3g}" if abs(risen) > 1e-9 else "as the base")
    title = "means over seeds, at the end ± one standard deviation; above the dotted line forgotten, below it better than the base"
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def plan_records(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant: its size, its runs without null controls, the tokens of all of these, and how many are done."""
    records = []
    for variant in variants:
        searches, repeats, _ = runs_of([variant], comparison)
        count, tokens = len(searches) + len(comparison.seeds) - 1, tokens_of(variant)
        records.append(
            {
                "variant": variant.name,
                "method": _made_by(variant.upscale, variant.train),
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_words(rate, variant.train, variant.upscale) for rate in variant.rates],
                "runs": count,
                "tokens": None if tokens is None else tokens * count,
                "done": sum(read_result(run.folder(comparison)) is not None for run in [*searches, *repeats]),
            }
        )
    return records


def plan_table(records: Sequence[Mapping[str, Any]], has_controls: bool) -> TextTable:
    """Return the plan of a comparison as a table, a row per record; numbers that only training knows are empty."""
    rows = []
    for one in records:
        row = {**one, "rates": ", ".join(one["rates"]), "done": f"{one['done']} of {one['runs']}"}
        rows.append(["" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()])
    later = "; then null controls, which are not counted here" if has_controls else ""
    head = ["variant", "method", "new parameters", "trained parameters", "rates", "runs", "tokens of all runs", "done"]
    return TextTable(f"Each rate with the first seed, the best rate with the others{later}", head, rows)


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
    sections = [Section("", cautions(findings), pictures=pictures), Section("", tables=tables(findings))]
    sections.append(Section("How to read this", [_HOW_TO_READ, shared_origin(findings)]))
    page = root / "report.html"
    write_page(page, f"What variants of {Path(comparison.base).name} learned and forgot", sections)
    return page
