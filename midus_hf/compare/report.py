"""The report of a comparison: tables, a picture, one page, and files for other programs."""

import csv
import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midus_hf.compare.doubts import doubts, origin_words, shared_origin
from midus_hf.compare.findings import Findings, VariantFindings, paired_differences, sentences, with_spread
from midus_hf.compare.learning import falls, mean_loss, spread, verdict
from midus_hf.compare.options import Comparison, PaperOptions, rate_name
from midus_hf.compare.origins import KINDS
from midus_hf.compare.results import Measured, Result, read_result
from midus_hf.compare.running import repeats_of
from midus_hf.compare.runs import searches_of, tokens_of
from midus_hf.compare.stage_report import HOW_TO_READ, draw_stages, stage_tables, stages_as_json
from midus_hf.compare.variants import Variant
from midus_hf.look.page import Section, TableOfWords, write_page
from midus_hf.look.pictures import as_png, new_figure
from upscalers.methods.contract import get_method
from upscalers.request.options import parse_options

# Options of methods that set sizes, which the report has by default too.
_SIZES = ("n", "k", "slots", "chapters", "rows", "sizes", "layers")
# Columns of the table of variants that a terminal has room for.
_SHORT = ("variant", "rate", "trains", "domain loss", "learned", "forgotten", "doubts")
_STAGES = {"trained": "after training", "tuned": "after fine-tuning"}
# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match")
# The metric of tasks that measure the perplexity of a text.
_WORD_PERPLEXITY = "word_perplexity"
_HOW_TO_READ = (
    "Losses are nats per token of held-out text, each text counting alike; ± is the standard deviation over seeds, and says "
    "nothing of other texts and questions. Each model is measured against its own state right after upscaling: learned is what "
    "the loss of the domain fell by, forgotten what the loss outside it rose by. Where that state was not seen to be the base's, "
    "the difference between the two by midus eval is taken off. Each variant is reported at the rate with which its first seed "
    "ended lowest on the validation texts, which are part of no other number. A null control is the same memory with its "
    "addressing taken away, trained at the variant's rate, which need not be the null control's own best. Losses of the base, and "
    "those after fine-tuning or shuffling, are measured by midus eval on weights as they are saved; the others by the Trainer in "
    "the precision of training, on packed sequences whose first tokens are not predicted. A loss of one kind cannot be subtracted "
    "from one of the other. Seconds and tokens per second are those of this machine with all else that ran on it."
)


def short_count(number: int) -> str:
    """Return a count, 0 or more, as short text of three significant digits: `8.89M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def variants_table(findings: Findings, short: bool = False) -> TableOfWords:
    """Return the table of what each variant learned and forgot at its rate: the base, then variants by rising domain loss.

    Below a variant that was fine-tuned stand its losses and metrics after fine-tuning. The column `doubts` has numbers of rows of
    `doubts_table`. A `short` table has few columns.
    """
    comparison = findings.comparison
    domain, retention = list(comparison.domain), list(comparison.retention)
    tasks = [] if comparison.tasks is None else comparison.tasks.names
    base = Measured(_losses_of_base(findings), findings.base.tasks)
    rows = [{"variant": "base", **_measured_cells(findings, [base], tasks)}]
    for variant in findings.variants:
        rows.append(_variant_cells(findings, variant, tasks))
        tuned = [result.tuned for result in variant.results if result.tuned is not None]
        if tuned:
            rows.append({"variant": f"{variant.name}, fine-tuned", **_measured_cells(findings, tuned, tasks)})
    head = ["variant", "rate", "seeds", "new", "trains", *(["domain loss", "learned"] if domain else [])]
    head += [*(["forgotten"] if retention else []), *retention, *tasks]
    head += ["seconds", "tokens/s", "memory, GB", "starts at base"]
    head += ["certified"] if any(variant.is_certified for variant in findings.variants) else []
    origins = {kind: by_row for kind in KINDS if (by_row := origin_words(findings, kind))}
    for row in rows:
        row |= {kind: by_row.get(row["variant"], "") for kind, by_row in origins.items()}
        row["doubts"] = ", ".join(_numbers_of_doubts(findings, row["variant"]))
    head += [*origins, "doubts"]
    head = [column for column in head if column in _SHORT or not short]
    cells = [[row.get(column, "") for column in head] for row in rows]
    return TableOfWords("What each learned and forgot", head, cells)


def _losses_of_base(findings: Findings) -> Mapping[str, float]:
    """Return the losses of the base as the Trainer measures the runs: the start of a run that starts at the base.

    In stages, which the Trainer does not measure, and if no run starts at the base, `midus eval` measured the losses.
    """
    results = [result for variant in findings.variants for result in variant.results]
    starts = [result.start.losses for result in results if result.curve and result.upscaled is None]
    return findings.base.losses if findings.comparison.stages or not starts else starts[0]


def _variant_cells(findings: Findings, variant: VariantFindings, tasks: Sequence[str]) -> dict[str, str]:
    """Return the cells of a trained variant by the heads of their columns."""
    results = variant.results
    cells = _measured_cells(findings, [Measured(result.losses, result.tasks) for result in results], tasks)
    before = _measured_cells(findings, [Measured({}, result.tasks_before) for result in results], tasks)
    for task in tasks:
        is_whole = cells[task] and before[task]
        cells[task] = f"{before[task].split(' ')[0]} → {cells[task]}" if is_whole else ""
    cells |= {"variant": variant.name, "rate": variant.rate, "seeds": str(len(results))}
    trains = short_count(results[0].trained_parameters)
    cells |= {"new": short_count(results[0].new_parameters), "trains": trains + ", all" * results[0].trains_all}
    cells["certified"] = "yes" if variant.is_certified else ""
    cells |= {name: with_spread(getattr(variant, name), "{:+.4f}") for name in ("learned", "forgotten")}
    cells["seconds"] = f"{statistics.fmean(one.seconds for one in results):.0f}"
    speeds = [one.tokens / one.seconds for one in results if one.seconds]
    cells["tokens/s"] = f"{statistics.fmean(speeds):,.0f}" if speeds else ""
    cells["memory, GB"] = f"{max(one.peak_memory_bytes for one in results) / 1e9:.2f}"
    starts = {one.starts_at_base for one in results}
    cells["starts at base"] = "" if starts == {None} else "yes" if starts == {True} else "no"
    return cells


def _measured_cells(findings: Findings, models: Sequence[Measured], tasks: Sequence[str]) -> dict[str, str]:
    """Return the cells of losses and tasks of a model per seed; a task that a seed lacks has an empty cell."""
    comparison = findings.comparison
    cells = {}
    losses = [one.losses for one in models if one.losses]
    if losses and comparison.domain:
        cells["domain loss"] = with_spread(spread([mean_loss(one, list(comparison.domain)) for one in losses]))
    if losses:
        cells |= {name: with_spread(spread([one[name] for one in losses])) for name in comparison.retention}
    for task in tasks:
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


def made_table(findings: Findings) -> TableOfWords:
    """Return the table of how each variant was made: the options that its recipe names, and defaults of options that set sizes."""
    rows = []
    for variant in findings.variants:
        request = variant.results[0].request
        keys, train = request.get("upscale"), request.get("train") or {}
        if keys is not None:
            method = get_method(keys["method"])
            known = method(
                parse_options(method.options_class, keys.get("options") or {}, method.name)
            ).recorded_options
            is_exact = known.get("table") == "exact"  # whose rows follow from its corpus
            sizes = {
                key: known[key] for key in _SIZES if known.get(key) is not None and (key != "rows" or not is_exact)
            }
            placement = f"{keys.get('num_new_layers', '')} {keys.get('placement') or method.default_placement or ''}"
            made = [method.name, placement.strip()]
            options = {**sizes, **{key: known[key] for key in keys.get("options") or {}}}
        else:
            function, options = findings.comparison.variants[variant.name].function, train.get("adapters") or {}
            made = [function or ("LoRA" if options else "the base"), ""]
        rows.append([variant.name, *made, ", ".join(f"{key}={value}" for key, value in options.items())])
    return TableOfWords("How each was made", ["variant", "method", "new layers, placement", "options"], rows)


def controls_table(findings: Findings) -> TableOfWords:
    """Return the table of variants beside their null controls, which shows what addressing is worth."""
    rows = []
    for variant in findings.variants:
        for control, advantage in variant.advantages.items():
            interval = "" if advantage.half_interval is None else f"± {advantage.half_interval:.4f}"
            numbers = [f"{advantage.mean:+.4f}", interval, str(advantage.count)]
            rows.append([variant.name, control, *numbers, verdict(advantage)])
    head = ["variant", "null control", "nats lower than the null control", "95 % interval", "seeds", ""]
    return TableOfWords("Memories beside their null controls", head, rows)


def differences_table(findings: Findings) -> TableOfWords:
    """Return the table of what each variant learned and forgot beyond the reference, paired by seed."""
    forgetting = ["forgotten"] if findings.comparison.retention else []
    rows = []
    for one in paired_differences(findings):
        numbers = [one.learned, *([one.forgotten] if forgetting else [])]
        cells = [with_spread(number, "{:+.4f}") for number in numbers]
        rows.append([one.variant, *cells, f"{one.ahead} of {one.learned.count}"])
    name = "" if findings.reference is None else findings.reference.name
    head = ["variant", "learned", *forgetting, "seeds with which it learned more"]
    return TableOfWords(f"Difference to {name}, paired by seed", head, rows)


def doubts_table(findings: Findings) -> TableOfWords:
    """Return the table of reasons for which variants cannot be compared as they stand, numbered from 1."""
    rows = [
        [str(number), doubt.reason, ", ".join(f"{name} {detail}".strip() for name, detail in doubt.variants.items())]
        for number, doubt in enumerate(doubts(findings), start=1)
    ]
    return TableOfWords("What to doubt", ["", "why", "variants"], rows)


def _numbers_of_doubts(findings: Findings, variant: str) -> list[str]:
    """Return the numbers of the rows of `doubts_table` that concern a variant."""
    return [str(number) for number, doubt in enumerate(doubts(findings), start=1) if variant in doubt.variants]


def paper_tables(findings: Findings) -> list[TableOfWords]:
    """Return the tables of a paper, one per stage: a row of our numbers, followed by a row of the paper's."""
    paper = findings.comparison.paper
    if paper is None:
        return []
    tables = []
    for stage, when in _STAGES.items():
        rows = []
        for variant in findings.variants:
            printed = getattr(paper, stage).get(variant.name)
            if printed is None:
                continue
            ours = []
            for column in paper.columns:
                numbers = [paper_number(paper, column, one, stage == "tuned") for one in variant.results]
                known = [number for number in numbers if number is not None]
                ours.append(with_spread(spread(known), "{:.2f}") if known else "-")
            theirs = ["-" if number is None else f"{number:.2f}" for number in printed]
            rows += [[variant.name, *ours, str(len(variant.results))], ["paper", *theirs, ""]]
        tables.append(TableOfWords(f"{paper.title}: {when}", ["", *paper.columns, "seeds"], rows))
    return tables


def paper_number(paper: PaperOptions, column: str, result: Result, tuned: bool = False) -> float | None:
    """Return the number of a result in a column of a paper's table: per cent, or a perplexity; None if it was not measured."""
    measured = result.measured(tuned)
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


def tables(findings: Findings, short: bool = False) -> list[TableOfWords]:
    """Return all tables of a report that have rows; the `short` ones are for a terminal."""
    failed = TableOfWords("Failed", ["run", "why"], [[name, why] for name, why in findings.failures.items()])
    all_tables = [
        variants_table(findings, short),
        *([] if short else [made_table(findings)]),
        differences_table(findings),
    ]
    all_tables += stage_tables(findings) if findings.comparison.stages else []
    all_tables += [*paper_tables(findings), controls_table(findings), doubts_table(findings), failed]
    return [table for table in all_tables if table.rows]


def draw(findings: Findings) -> bytes:
    """Draw learning against what happened to other texts, a path of mean losses per variant with deviations at its end, as PNG.

    Without retention texts, learning is drawn against tokens. Of variants that do not start at the base, the end alone is drawn. A
    ring marks variants whose models came with a certificate. The picture needs matplotlib.
    """
    import matplotlib

    comparison = findings.comparison
    domain, retention = list(comparison.domain), list(comparison.retention)
    figure = new_figure(9.0, 5.5)
    axes = figure.subplots()
    ring: dict[str, Any] = {"s": 160, "facecolors": "none", "linewidths": 1.5}
    colors = matplotlib.colormaps["tab20" if len(findings.variants) > 10 else "tab10"]
    for number, variant in enumerate(findings.variants):
        learned = _by_moment([falls(result, findings.base, domain) for result in variant.results])
        if retention:
            other = _by_moment([[-fall for fall in falls(one, findings.base, retention)] for one in variant.results])
        else:
            other = _by_moment([[float(point.tokens) for point in result.curve] for result in variant.results])
        xs, ys = (learned, other) if retention else (other, learned)
        first = -1 if variant.starts_elsewhere else 0
        color = colors(number % colors.N)
        axes.plot([x.mean for x in xs[first:]], [y.mean for y in ys[first:]], color=color, label=variant.name)
        if variant.is_certified:
            axes.scatter(xs[-1].mean, ys[-1].mean, **ring, edgecolors=color)
        deviations = {"xerr": xs[-1].deviation, "yerr": ys[-1].deviation}
        axes.errorbar(xs[-1].mean, ys[-1].mean, **deviations, fmt="o", capsize=3, color=color)
    axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
    if any(variant.is_certified for variant in findings.variants):
        axes.scatter([], [], **ring, edgecolors="#555555", label="with a certificate")
    learning = "learned: what the loss of the domain fell by (nats per token)"
    if retention:
        axes.set(xlabel=learning, ylabel="change of the loss of other text (nats per token)")
        axes.yaxis.set_major_formatter(lambda change, _: f"{change:+.3g}" if abs(change) > 1e-9 else "as the base")
        for label, offset, side in (("forgotten ↑", 5, "bottom"), ("better than the base ↓", -5, "top")):
            options = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": "#666666"}
            axes.annotate(label, (1.0, 0.0), (0, offset), **options, ha="right", va=side, fontsize=9)
    else:
        axes.set(xlabel="tokens trained on", ylabel=learning)
    axes.set_title(
        "means over seeds; ends ± one standard deviation over seeds", fontsize=9, loc="left", color="#666666"
    )
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def _by_moment(runs: Sequence[Sequence[float]]) -> list[Any]:
    """Return the spread over runs of each moment: first the moments that all runs have before their ends, then the ends."""
    common = min(map(len, runs)) - 1
    moments = [*zip(*(run[:common] for run in runs), strict=True), [run[-1] for run in runs]]
    return [spread(list(moment)) for moment in moments]


def planned(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs, their tokens, and how many runs are done, for other programs.

    Runs of null controls are not counted: they are added once all variants have ended.
    """
    records = []
    for variant in variants:
        searches, tokens = searches_of(variant, comparison), tokens_of(variant, len(comparison.stages) or 1)
        count = len(searches) + len(comparison.seeds) - 1
        done = [*searches, *repeats_of(variant, comparison)]
        records.append(
            {
                "variant": variant.name,
                "method": variant.function if variant.upscale is None else variant.upscale["method"],
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_name(rate) for rate in variant.rates],
                "runs": count,
                "tokens": None if tokens is None else tokens * count,
                "done": sum(read_result(run.folder(comparison)) is not None for run in done),
            }
        )
    return records


def plan_table(comparison: Comparison, variants: Sequence[Variant]) -> TableOfWords:
    """Return the plan of a comparison as a table with a row per variant."""
    rows, records = [], planned(comparison, variants)
    for record in records:
        trained = record["trained_parameters"]
        trains = "as training says" if trained is None else short_count(trained)
        cells = [record["variant"], record["method"] or "the base", short_count(record["new_parameters"]), trains]
        tokens = "as training says" if record["tokens"] is None else f"{record['tokens']:,}"
        rows.append([*cells, ", ".join(record["rates"]), tokens, f"{record['done']} of {record['runs']}"])
    counts = [record["tokens"] for record in records]
    on = "" if None in counts else f" on {sum(counts):,} tokens"
    has_controls = any(variant.controls and variant.upscale is not None for variant in variants)
    title = (
        f"{sum(record['runs'] for record in records)} runs{on}: each rate with seed {comparison.seeds[0]}, the best rate with "
        f"{len(comparison.seeds) - 1} more{'; null controls are added at the end' * has_controls}"
    )
    return TableOfWords(title, ["variant", "method", "new", "trains", "rates", "tokens", "runs done"], rows)


def as_json(findings: Findings, files: Sequence[Path]) -> dict[str, Any]:
    """Return the findings as a JSON object, for other programs."""
    variants = [
        {
            "variant": variant.name,
            "rate": variant.rate,
            "seeds": [result.seed for result in variant.results],
            "new_parameters": variant.results[0].new_parameters,
            "trained_parameters": variant.results[0].trained_parameters,
            "domain_loss": variant.domain_loss and asdict(variant.domain_loss),
            "learned": variant.learned and asdict(variant.learned),
            "forgotten": variant.forgotten and asdict(variant.forgotten),
            "certified": variant.is_certified,
            "controls": {
                control: {**asdict(advantage), "verdict": verdict(advantage)}
                for control, advantage in variant.advantages.items()
            },
        }
        for variant in findings.variants
    ]
    return {
        "base": {"losses": dict(findings.base.losses), "tasks": findings.base.tasks},
        "variants": variants,
        "paper": [table._asdict() for table in paper_tables(findings)],
        "reference": None if findings.reference is None else findings.reference.name,
        "differences": [asdict(one) for one in paired_differences(findings)],
        "doubts": [asdict(doubt) for doubt in doubts(findings)],
        "origin": dict(findings.base.origin),
        "stages": stages_as_json(findings) if findings.comparison.stages else {},
        "failed": dict(findings.failures),
        "missing": findings.missing,
        "files": list(map(str, files)),
    }


def write_report(root: Path, findings: Findings, results: Sequence[Result]) -> list[Path]:
    """Write `runs.csv` and `report.html`, a page that needs no other file, and return their paths.

    The page has a picture if matplotlib is installed, and variants with results are measured on domain texts.
    """
    pictures = {}
    if findings.variants and findings.comparison.domain and importlib.util.find_spec("matplotlib") is not None:
        pictures["Learning, and the change of other text" if findings.comparison.retention else "Learning"] = draw(
            findings
        )
        if findings.comparison.stages:
            pictures["Gains after each stage"] = draw_stages(findings)
    how_to_read = HOW_TO_READ if findings.comparison.stages else _HOW_TO_READ
    runs, page = root / "runs.csv", root / "report.html"
    write_runs(runs, [findings.base, *results], list(findings.comparison.texts))
    caveats = [how_to_read, *filter(None, [shared_origin(findings)])]
    sections = [Section("", sentences(findings), pictures=pictures), Section("", tables=tables(findings))]
    title = f"What variants of {Path(findings.comparison.base).name} learned and forgot"
    write_page(page, title, [*sections, Section("How to read this", caveats)])
    return [runs, page]


def write_runs(path: Path, results: Sequence[Result], texts: Sequence[str]) -> None:
    """Write a CSV file with a row per run and step at which texts were measured."""
    head = "variant control_of control rate seed new_parameters trained_parameters step tokens seconds".split()
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*head, *(f"loss_{name}" for name in texts)])
        for result in results:
            own = [result.variant, result.control_of, result.control, rate_name(result.rate), result.seed]
            for point in result.curve:
                losses = [point.losses.get(name, math.nan) for name in texts]
                counts = [result.new_parameters, result.trained_parameters]
                writer.writerow([*own, *counts, point.step, point.tokens, point.seconds, *losses])
