"""The report of a comparison: tables, a picture, one page, and numbers for other programs."""

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
    VariantFindings,
    cautions,
    paired,
    shared_origin,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison, PaperOptions
from midus_hf.compare.results import Measured, Result, read_result
from midus_hf.compare.running import repeats_of
from midus_hf.compare.runs import searches_of, tokens_of
from midus_hf.compare.variants import Variant, rate_words
from midus_hf.files.outputs import whole_file
from midus_hf.look.page import Section, TableOfWords, write_page
from midus_hf.look.pictures import as_png, new_figure
from upscalers.methods.contract import get_method
from upscalers.request.options import parse_options

# Options of methods that set sizes, which the report has by default too.
_SIZES = ("n", "k", "slots", "chapters", "memory_tokens", "rows", "sizes", "layers")
_TRAININGS = {"trained": "after training", "tuned": "after fine-tuning"}
# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match")
# The metric of tasks that measure the perplexity of a text.
_WORD_PERPLEXITY = "word_perplexity"
_HOW_TO_READ = (
    "Losses are nats per token of held-out text, each text counting alike, on packed sequences whose first tokens are not "
    "predicted. ± is the standard deviation over seeds, or the half of a 95 % interval where a table says so; neither says "
    "anything of other texts. Learned is what the loss of the domain fell by, forgotten what the loss outside it rose by, from "
    "the run's own start, or from the base where upscaling was not seen to keep what the base computes. Each variant is reported "
    "at the rate with which its first seed ended lowest on the validation texts, which are part of no other number. A null "
    "control is the same memory with its addressing taken away, trained at the variant's rate, which need not be the null "
    "control's own best."
)
_HOW_TO_READ_STAGES = (
    "Losses are nats per token over documents that are measured one by one. A table of stages says how far a model lies below the "
    "base, the mean over seeds; texts outside the stages are retention. Learned is the mean over all stages at the end. Backward "
    "transfer is the mean over all stages but the last of the loss right after the stage minus the loss at the end: below 0, "
    "later stages cost what was learned. With one model per stage, a document is measured by the model of the nearest stage to "
    "the whole document, or by the base where no stage is near; trained parameters are those of one stage."
)


def with_spread(numbers: Spread | None, form: str = "{:.4f}") -> str:
    """Return a mean as text, followed by ± and the standard deviation over seeds if there are several seeds."""
    if numbers is None:
        return ""
    text = form.format(numbers.mean)
    return text if numbers.deviation is None else f"{text} ± {form.format(numbers.deviation).lstrip('+')}"


def with_interval(numbers: Spread | None) -> str:
    """Return a mean as text, followed by ± and half of its 95 % interval if there are several seeds."""
    if numbers is None:
        return ""
    half = numbers.half_interval
    return f"{numbers.mean:+.4f}" if half is None else f"{numbers.mean:+.4f} ± {half:.4f}"


def short_count(number: int) -> str:
    """Return a count, 0 or more, as short text of three significant digits: `8.89M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def tables(findings: Findings) -> list[TableOfWords]:
    """Return all tables of a report that have rows."""
    failed = TableOfWords("Failed", ["run", "why"], [[name, why] for name, why in findings.failures.items()])
    all_tables = [variants_table(findings), made_table(findings), differences_table(findings), *stage_tables(findings)]
    all_tables += [*paper_tables(findings), controls_table(findings), failed]
    return [table for table in all_tables if table.rows]


def variants_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant learned and forgot at its rate: the base, then variants by rising domain loss.

    Below a variant that was fine-tuned stand its loss and metrics after fine-tuning.
    """
    comparison = findings.comparison
    tasks = [] if comparison.tasks is None else comparison.tasks.names
    rows = [{"variant": "base", **_measured_cells(comparison, [Measured(findings.base_losses, findings.base.tasks)])}]
    for variant in findings.variants:
        rows.append(_variant_cells(findings, variant))
        tuned = [result.tuned for result in variant.results if result.tuned is not None]
        if tuned:
            rows.append({"variant": f"{variant.name}, fine-tuned", **_measured_cells(comparison, tuned)})
    head = ["variant", "rate", "seeds", "trained parameters"]
    head += ["domain loss", "learned"] if comparison.domain else []
    head += ["forgotten"] if comparison.retention else []
    head += ["backward transfer", "documents at their stage"] if comparison.stages else tasks
    head += ["seconds", "peak GB", "starts at base"]
    head += ["certified"] if any(variant.is_certified for variant in findings.variants) else []
    cells = [[row.get(column, "") for column in head] for row in rows]
    title = "What each learned and forgot" + "; losses in nats per token" * bool(comparison.texts)
    return TableOfWords(title, head, cells)


def _variant_cells(findings: Findings, variant: VariantFindings) -> dict[str, str]:
    """Return the cells of a trained variant by the heads of their columns."""
    results = variant.results
    cells = _measured_cells(findings.comparison, [Measured(result.losses, result.tasks) for result in results])
    starts = {one.starts_at_base for one in results}
    routed = [100 * statistics.fmean(one.routed.values()) for one in results if one.routed]
    request = results[0].request
    return cells | {
        "variant": variant.name,
        "rate": rate_words(results[0].rate, request.get("train") or {}, request.get("upscale")),
        "seeds": str(len(results)),
        "trained parameters": short_count(results[0].trained_parameters),
        "learned": with_spread(variant.learned, "{:+.4f}"),
        "forgotten": with_spread(variant.forgotten, "{:+.4f}"),
        "backward transfer": with_spread(backward_transfer(findings, variant), "{:+.4f}"),
        "documents at their stage": with_spread(spread(routed), "{:.0f} %"),
        "seconds": f"{statistics.fmean(one.seconds for one in results):.0f}",
        "peak GB": f"{max(one.peak_memory_bytes for one in results) / 1e9:.2f}",
        "starts at base": "" if starts == {None} else "yes" if starts == {True} else "no",
        "certified": "yes" if variant.is_certified else "",
    }


def made_table(findings: Findings) -> TableOfWords:
    """Return the table of how each variant was made: options that its keys name, and defaults of options that set sizes."""
    rows = []
    for variant in findings.variants:
        request = variant.results[0].request
        upscaling, function, train = request.get("upscale"), request.get("function"), request.get("train") or {}
        options = dict(train.get("adapters") or {})
        made = [_made_by(upscaling, function and function["name"], train), "", ""]
        if upscaling is not None:
            method, values = get_method(upscaling["method"]), upscaling.get("options") or {}
            recorded = method(parse_options(method.options_class, values, method.name)).recorded_options
            # An exact table has as many rows as its corpus has n-grams.
            sizes = [key for key in _SIZES if (key, recorded.get("table")) != ("rows", "exact")]
            options = {key: recorded[key] for key in recorded if key in values or key in sizes} | options
            placement = upscaling.get("placement") or method.default_placement or ""
            made[1:] = [str(upscaling.get("num_new_layers") or ""), str(placement)]
        rows.append([variant.name, *made, ", ".join(f"{key}={value}" for key, value in options.items())])
    return TableOfWords("How each was made", ["variant", "method", "new layers", "placement", "options"], rows)


def _made_by(upscaling: Mapping[str, Any] | None, function: str | None, train: Mapping[str, Any]) -> str:
    """Return what makes a variant: its method, or its function, or LoRA on the base; `the base` where the base itself trains."""
    if upscaling is not None:
        return str(upscaling["method"])
    return function or ("LoRA" if train.get("adapters") else "the base")


def _measured_cells(comparison: Comparison, models: Sequence[Measured]) -> dict[str, str]:
    """Return the cells of the domain's loss and of tasks, of a model per seed; a task that a seed lacks has an empty cell."""
    domain = list(comparison.domain)
    losses = [statistics.fmean(one.losses[name] for name in domain) for one in models if domain and one.losses]
    cells = {"domain loss": with_spread(spread(losses))}
    for task in [] if comparison.tasks is None else comparison.tasks.names:
        shares = [metric_of(one.tasks.get(task, {})) for one in models]
        known = [share for share in shares if share is not None]
        cells[task] = with_spread(spread(known), "{:.3f}") if len(known) == len(shares) else ""
    return cells


def metric_of(metrics: Mapping[str, float]) -> float | None:
    """Return the metric of a task that reports show, from 0 to 1: the first of acc_norm, acc and exact_match; None if it has none."""
    by_metric: dict[str, float] = {}
    for name, value in metrics.items():  # of a metric behind several filters, the first counts
        by_metric.setdefault(name.partition(",")[0], value)
    return next((by_metric[name] for name in _METRICS if name in by_metric), None)


def controls_table(findings: Findings) -> TableOfWords:
    """Return the table of variants beside their null controls, which shows what addressing is worth."""
    rows = [
        [variant.name, control, with_interval(advantage), str(advantage.count), verdict(advantage)]
        for variant in findings.variants
        for control, advantage in variant.advantages.items()
    ]
    head = ["variant", "null control", "nats lower than the null control, 95 %", "seeds", ""]
    return TableOfWords("Memories beside their null controls", head, rows)


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


def differences_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant learned and forgot beyond the reference, paired by seed."""
    rows = [
        [name, with_interval(learned), with_interval(forgotten), str(learned.count)]
        for name, (learned, forgotten) in differences(findings).items()
    ]
    name = "" if findings.reference is None else findings.reference.name
    title = f"Difference to {name}, which learned most, paired by seed, with 95 % intervals"
    return TableOfWords(title, ["variant", "learned", "forgotten", "seeds"], rows)


def gains(findings: Findings, variant: VariantFindings) -> list[list[float]]:
    """Return how far the loss of each text lies below the base after each stage, the mean over seeds, in nats per token.

    Rows are stages, columns the texts of stages and then of retention.
    """
    texts = [*findings.comparison.domain, *findings.comparison.retention]
    return [
        [
            findings.base_losses[text] - statistics.fmean(one.curve[stage].losses[text] for one in variant.results)
            for text in texts
        ]
        for stage in range(1, len(findings.comparison.stages) + 1)
    ]


def backward_transfer(findings: Findings, variant: VariantFindings) -> Spread | None:
    """Return, over seeds, the mean of losses of earlier stages right after the stage minus those at the end; None without stages."""
    earlier = list(findings.comparison.stages)[:-1]
    return spread(
        [
            statistics.fmean(
                one.curve[number].losses[stage] - one.losses[stage] for number, stage in enumerate(earlier, start=1)
            )
            for one in variant.results
            if earlier
        ]
    )


def stage_tables(findings: Findings) -> list[TableOfWords]:
    """Return a table of gains after each stage for each variant; none without stages."""
    comparison, made = findings.comparison, []
    for variant in findings.variants if comparison.stages else ():
        rows = [
            [f"after {stage}", *(f"{gain:+.4f}" for gain in row)]
            for stage, row in zip(comparison.stages, gains(findings, variant), strict=True)
        ]
        head = ["", *comparison.domain, *comparison.retention]
        made.append(TableOfWords(f"{variant.name}: nats below the base", head, rows))
    return made


def paper_tables(findings: Findings) -> list[TableOfWords]:
    """Return the tables of a paper, after training and after fine-tuning: a row of our numbers, followed by a row of the paper's."""
    paper = findings.comparison.paper
    if paper is None:
        return []
    made = []
    for training, when in _TRAININGS.items():
        rows = []
        for variant in findings.variants:
            printed = getattr(paper, training).get(variant.name)
            if printed is None:
                continue
            ours = []
            for column in paper.columns:
                numbers = [paper_number(paper, column, one, training == "tuned") for one in variant.results]
                known = spread([number for number in numbers if number is not None])
                ours.append("-" if known is None else with_spread(known, "{:.2f}"))
            theirs = ["-" if number is None else f"{number:.2f}" for number in printed]
            rows += [[variant.name, *ours, str(len(variant.results))], ["paper", *theirs, ""]]
        made.append(TableOfWords(f"{paper.title}: {when}", ["", *paper.columns, "seeds"], rows))
    return made


def paper_number(paper: PaperOptions, column: str, result: Result, tuned: bool = False) -> float | None:
    """Return the number of a result in a column of a paper's table: per cent, or a perplexity; None if it was not measured."""
    measured = result.tuned if tuned else Measured(result.losses, result.tasks)
    if measured is None:
        return None
    subject = paper.columns[column]
    if subject is None:
        tasks = [name for name in paper.columns.values() if name is not None and name not in measured.losses]
        shares = [share for name in tasks if (share := metric_of(measured.tasks.get(name, {}))) is not None]
        # A mean of fewer tasks than the paper's would be of something else.
        is_whole = shares and all(name in measured.tasks for name in tasks)
        return 100 * statistics.fmean(shares) if is_whole else None
    if subject in measured.losses:
        return math.exp(measured.losses[subject])
    metrics = measured.tasks.get(subject, {})
    share = metric_of(metrics)
    return metrics.get(_WORD_PERPLEXITY) if share is None else 100 * share


def draw(findings: Findings) -> bytes:
    """Draw learning against what happened to other texts, a path of mean losses per variant with deviations at its end, as PNG.

    Of variants that do not start at the base, the end alone is drawn. A ring marks the end of a certified variant. The picture needs
    matplotlib.
    """
    import matplotlib

    comparison = findings.comparison
    figure = new_figure(9.0, 5.5)
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20" if len(findings.variants) > 10 else "tab10"]
    for number, variant in enumerate(findings.variants):
        learned = zip(*(findings.falls(one, list(comparison.domain)) for one in variant.results), strict=True)
        other = zip(*(findings.falls(one, list(comparison.retention)) for one in variant.results), strict=True)
        first = -1 if any(one.starts_elsewhere for one in variant.results) else 0
        xs = [statistics.fmean(falls) for falls in learned][first:]
        ys = [-statistics.fmean(falls) for falls in other][first:]
        color = colors(number % colors.N)
        axes.plot(xs, ys, color=color, label=variant.name + ", certified" * variant.is_certified)
        if variant.is_certified:
            axes.scatter(xs[-1], ys[-1], s=160, facecolors="none", edgecolors=color)
        assert variant.learned is not None and variant.forgotten is not None, "there are texts of both kinds"
        deviations = {"xerr": variant.learned.deviation, "yerr": variant.forgotten.deviation}
        axes.errorbar(xs[-1], ys[-1], **deviations, fmt="o", capsize=3, color=color)
    axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
    axes.set(xlabel="learned (nats per token)", ylabel="change of the loss of other text (nats per token)")
    for label, offset, side in (("forgotten ↑", 5, "bottom"), ("better than the base ↓", -5, "top")):
        options = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": side}
        axes.annotate(label, (1.0, 0.0), (0, offset), **options, fontsize=9)
    axes.yaxis.set_major_formatter(lambda risen, _: f"{risen:+.3g}" if abs(risen) > 1e-9 else "as the base")
    axes.set_title("means over seeds; ends ± one standard deviation over seeds", fontsize=9, loc="left")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def planned(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs, their tokens, and how many runs are done.

    Runs of the base and of null controls are not counted; the latter are added once all variants have ended.
    """
    records = []
    for variant in variants:
        searches, tokens = searches_of(variant, comparison), tokens_of(variant, len(comparison.stages) or 1)
        count = len(searches) + len(comparison.seeds) - 1
        done = [*searches, *repeats_of(variant, comparison)]
        records.append(
            {
                "variant": variant.name,
                "method": _made_by(variant.upscale, variant.function, variant.train),
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_words(rate, variant.train, variant.upscale) for rate in variant.rates],
                "runs": count,
                "tokens": None if tokens is None else tokens * count,
                "done": sum(read_result(run.folder(comparison)) is not None for run in done),
            }
        )
    return records


def plan_table(records: Sequence[Mapping[str, Any]], has_controls: bool) -> TableOfWords:
    """Return the plan of a comparison as a table with a row per record of `planned`; a number that training alone knows is empty."""
    rows = []
    for record in records:
        trained, tokens = record["trained_parameters"], record["tokens"]
        sizes = [short_count(record["new_parameters"]), "" if trained is None else short_count(trained)]
        counts = ["" if tokens is None else f"{tokens:,}", f"{record['done']} of {record['runs']}"]
        rows.append([record["variant"], record["method"], *sizes, ", ".join(record["rates"]), *counts])
    title = "Each rate with the first seed, the best rate with the others"
    title += "; then null controls, which are not counted here" * has_controls
    head = ["variant", "method", "new parameters", "trained parameters", "rates", "tokens of all runs", "runs done"]
    return TableOfWords(title, head, rows)


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
    """Write `report.html`, a page that needs no other file, and return its path.

    The page has a picture, which is also written as `frontier.png`, if matplotlib is installed, and variants with results are
    measured on domain and retention texts.
    """
    comparison, pictures = findings.comparison, {}
    picture = root / "frontier.png"
    picture.unlink(missing_ok=True)  # of an earlier report
    has_both = findings.variants and comparison.domain and comparison.retention
    if has_both and importlib.util.find_spec("matplotlib") is not None:
        pictures["Learned and forgotten"] = draw(findings)
        with whole_file(picture) as partial:
            partial.write_bytes(pictures["Learned and forgotten"])
    how_to_read = [_HOW_TO_READ_STAGES if comparison.stages else _HOW_TO_READ, shared_origin(findings)]
    sections = [Section("", cautions(findings), pictures=pictures), Section("", tables=tables(findings))]
    title = f"What variants of {Path(comparison.base).name} learned and forgot"
    page = root / "report.html"
    write_page(page, title, [*sections, Section("How to read this", how_to_read)])
    return page
