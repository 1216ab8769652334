"""The report of a comparison: what variants learned and forgot, cautions, advice, a table, a picture, and JSON."""

import dataclasses
import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.plan import SHUFFLED, Comparison, Rate, Variant, rate_name
from midus_hf.compare.run import Result, chosen_rate, count_runs, find_stages, mean_loss, read_results
from midus_hf.files.outputs import atomic_write, write_text
from midus_hf.look.page import TextTable, as_png, new_figure

_METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")  # of a task, in order of preference
# Student's t at 0.975 for 1 to 10 degrees of freedom; more take the last, which makes intervals wider.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; a single number has no deviation."""

    mean: float
    deviation: float | None
    count: int

    @property
    def half_interval(self) -> float | None:
        """Half the width of the mean's 95 % confidence interval (Student's t); None for a single number."""
        if self.deviation is None:
            return None
        return _STUDENT[min(self.count - 1, len(_STUDENT)) - 1] * self.deviation / math.sqrt(self.count)


def spread(numbers: Sequence[float]) -> Spread | None:
    """Return the mean and the spread of numbers, one per seed; None if there are none."""
    if not numbers:
        return None
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def paired_spread(lower: Mapping[int, float], higher: Mapping[int, float]) -> Spread | None:
    """Return the spread of `higher - lower` over the seeds that both have; None if they share no seed."""
    return spread([higher[seed] - lower[seed] for seed in sorted(set(lower) & set(higher))])


def verdict(advantage: Spread) -> str:
    """Return in words whether a variant beats a null control: its 95 % interval of advantage is above 0."""
    if advantage.mean <= 0:
        return "does not beat it"
    if advantage.half_interval is None:
        return "one seed"
    return "beats it" if advantage.mean > advantage.half_interval else "is not shown to beat it"


@dataclasses.dataclass(frozen=True, eq=False)
class VariantFindings:
    """Findings about one variant, at the rate that the validation texts chose, in nats per token.

    `results` has one result per seed. `advantages` are differences of final domain loss to each null control over shared seeds; for
    `shuffled-addresses`, the rise when values are permuted. Learned is the decrease of the domain's mean loss, forgotten the increase
    on `retention`; None without texts.
    """

    name: str
    rate: str
    results: Sequence[Result]
    controls: Sequence[Result]
    learned_by_seed: Mapping[int, float]
    forgotten_by_seed: Mapping[int, float]
    advantages: Mapping[str, Spread]
    domain_loss: Spread | None
    learned: Spread | None
    forgotten: Spread | None

    @property
    def is_causal(self) -> bool:
        """True if every token is computed without later tokens; else losses cannot be compared."""
        return all(result.is_causal for result in self.results)


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings of a comparison: variants by domain loss, reasons of `failures` by run, and the number of `missing` runs."""

    comparison: Comparison
    base: Result
    variants: Sequence[VariantFindings]
    failures: Mapping[str, str]
    missing: int


def loss_decreases(result: Result, base: Result, texts: Sequence[str]) -> list[float]:
    """Return the decrease of the mean loss of some texts at each point of a run's curve, nats per token.

    It is relative to the run's start, or to the base if the upscaled model was not verified to compute the same: regaining what
    upscaling lost is not learning.
    """
    origin = base.losses if result.starts_elsewhere else result.start.losses
    return [mean_loss(origin, texts) - mean_loss(point.losses, texts) for point in result.curve]


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings from results; those of null controls count only at their variant's chosen rate."""
    domain = list(comparison.domain)
    retention = list(comparison.retention)
    variants = list[VariantFindings]()
    for name in comparison.variants:
        searches = [one for one in results if one.variant == name and one.seed == comparison.seeds[0]]
        if (chosen := chosen_rate(searches, list(comparison.validation))) is None:
            continue
        at_rate = [one for one in results if rate_name(one.rate) == rate_name(chosen)]
        own = [one for one in at_rate if one.variant == name]
        controls = [one for one in at_rate if one.control_of == name]
        ends = {one.seed: mean_loss(one.losses, domain) for one in own if domain}
        learned = {one.seed: loss_decreases(one, base, domain)[-1] for one in own if domain}
        forgotten = {one.seed: -loss_decreases(one, base, retention)[-1] for one in own if retention}
        losses: dict[str, dict[int, float]] = {}
        for one in controls:
            losses.setdefault(str(one.control), {})[one.seed] = mean_loss(one.losses, domain)
        leads = {control: paired_spread(ends, by_seed) for control, by_seed in losses.items()}
        shuffled = [(one.shuffled, one.saved) for one in own if one.shuffled and one.saved]
        leads[SHUFFLED] = spread([mean_loss(after, domain) - mean_loss(before, domain) for after, before in shuffled])
        advantages = {control: lead for control, lead in leads.items() if lead is not None}
        spreads = [spread(list(by_seed.values())) for by_seed in (ends, learned, forgotten)]
        variants += [VariantFindings(name, rate_name(chosen), own, controls, learned, forgotten, advantages, *spreads)]
    variants.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    return Findings(comparison, base, variants, failures, missing)


def cautions(findings: Findings) -> list[str]:
    """Return sentences on what keeps numbers from being compared, and on runs that are not done."""
    variants = findings.variants
    list_rates = findings.comparison.list_rates
    at_end = [one for one in variants if _is_at_end(one.results[0].rate, list_rates(one.name))]
    reasons: dict[str, list[str]] = {
        "Fewer than three seeds": [f"{one.name} {len(one.results)}" for one in variants if len(one.results) < 3],
        "Best rate at an end of its list": [f"{one.name} {one.rate}" for one in at_end],
        "Not causal, so losses cannot be compared": [one.name for one in variants if not one.is_causal],
        "Failed": [f"{name}: {why}" for name, why in findings.failures.items()],
        "Runs that are not done": [str(findings.missing)] if findings.missing else [],
    }
    return [f"{reason}: {', '.join(names)}." for reason, names in reasons.items() if names]


def _is_at_end(chosen: Rate, rates: Sequence[Rate]) -> bool:
    for key, rate in chosen.items():
        values = (each.get(key) for each in rates)
        searched = {value for value in values if value is not None}
        if len(searched) > 1 and rate in (min(searched), max(searched)):
            return True
    return False


def advice(findings: Findings) -> list[str]:
    """Return three sentences: the best at equal parameters, what forgets least, and what was too close."""
    variants = [one for one in findings.variants if one.is_causal]
    learned = {one: one.learned.mean for one in variants if one.learned is not None and one.learned.mean > 0}
    sizes = {one: one.results[0].trained_parameters for one in learned}
    groups = [[one for one, n in sizes.items() if abs(n - size) <= max(n, size) / 10] for size in sizes.values()]
    unclear: list[str] = []
    take = "At equal parameters: no two variants that learned have as many (within 10 %)."
    if group := max((each for each in groups if len(each) > 1), key=len, default=None):
        best = max(group, key=lambda one: learned[one])
        take = f"At equal parameters ({sizes[best]:,}), take {best.name}: it learned most of {len(group)}, "
        take += f"{learned[best]:.4f} nats per token."
        losses = {one: {seed: -value for seed, value in one.learned_by_seed.items()} for one in group}
        unclear += _unclear(f"{best.name} learned more than", best, losses)
    forgotten = {one: one.forgotten.mean for one in learned if one.forgotten is not None}
    forgets = "Forgets least: no variant that learned was measured on text outside the domain."
    if forgotten:
        least = min(forgotten, key=lambda one: forgotten[one])
        forgets = f"Forgets least: {least.name}, {forgotten[least]:+.4f} nats per token, and it learned {learned[least]:.4f}."
        unclear += _unclear(f"{least.name} forgot less than", least, {one: one.forgotten_by_seed for one in forgotten})
    for one in learned:
        names = [name for name, lead in one.advantages.items() if lead.mean > 0 and verdict(lead) != "beats it"]
        unclear += [f"{one.name} beats {', '.join(names)}"] if names else []
    too_few = f" whether {'; '.join(unclear)}." if unclear else ": nothing of the above."
    return [take, forgets, f"Too few seeds to tell{too_few}"]


def _unclear(claim: str, best: VariantFindings, values: Mapping[VariantFindings, Mapping[int, float]]) -> list[str]:
    """Return a claim and the variants without proof: their 95 % interval above the best includes 0."""
    leads = {one.name: paired_spread(values[best], by_seed) for one, by_seed in values.items() if one is not best}
    names = [name for name, lead in leads.items() if lead is None or verdict(lead) != "beats it"]
    return [f"{claim} {', '.join(names)}"] if names else []


def format_spread(numbers: Spread | None, form: str = "{:+.4f}", interval: bool = False) -> str:
    """Return a mean as text, with ± the standard deviation over seeds, or half of the 95 % interval."""
    if numbers is None:
        return ""
    width = numbers.half_interval if interval else numbers.deviation
    text = form.format(numbers.mean)
    return text if width is None else f"{text} ± {form.format(width).lstrip('+')}"


def variants_table(findings: Findings) -> TextTable:
    """Return the table: the base, then variants by domain loss at their rates, with their null controls."""
    comparison = findings.comparison
    tasks = [] if comparison.tasks is None else comparison.tasks.names

    def task_cells(results: Sequence[Result]) -> dict[str, str]:
        known = {each: [find_metric(one.tasks.get(each, {})) for one in results] for each in tasks}
        numbers = {task: [one for one in each if one is not None] for task, each in known.items()}
        return {task: format_spread(spread(each), "{:.3f}") for task, each in numbers.items()}

    rows = [{"variant": "base", **task_cells([findings.base])}]
    for one in findings.variants:
        row = {"variant": one.name, "rate": one.rate.replace(",", ", "), "seeds": str(len(one.results))}
        row |= {"trained": f"{one.results[0].trained_parameters:,}", **task_cells(one.results)}
        row |= {"learned": format_spread(one.learned), "forgotten": format_spread(one.forgotten)}
        row["time"] = f"{statistics.fmean(result.seconds for result in one.results):.0f} s"
        row["GB"] = f"{max(result.peak_memory_bytes for result in one.results) / 1e9:.2f}"
        rows.append(row)
        for control, lower in one.advantages.items():
            cell = f"{verdict(lower)}: {format_spread(lower, interval=True)}"
            rows.append({"variant": f"+{control}", "seeds": str(lower.count), "learned": cell})
    head = ["variant", "rate", "seeds", "trained"]
    if comparison.domain:
        head.append("learned")
    if comparison.retention:
        head.append("forgotten")
    head += [*tasks, "time", "GB"]
    unit = ", in nats per token" if comparison.texts else ""
    title = f"What each variant learned and forgot{unit}"
    return TextTable(title, head, [[row.get(column, "") for column in head] for row in rows])


def find_metric(metrics: Mapping[str, float]) -> float | None:
    """Return the metric of a task that reports show, the first of `_METRICS`, by its first filter; None if it has none."""
    by_metric = {name.partition(",")[0]: value for name, value in reversed(list(metrics.items()))}
    return next((by_metric[name] for name in _METRICS if name in by_metric), None)


def draw(findings: Findings) -> bytes:
    """Draw learning against forgetting as PNG, a path of means per variant, or only its end."""
    comparison = findings.comparison
    figure = new_figure(9.0, 5.5)
    axes = figure.subplots()
    for number, one in enumerate(findings.variants):
        first = -1 if any(result.starts_elsewhere for result in one.results) else 0
        paths = []
        for texts, sign in ((comparison.domain, 1), (comparison.retention, -1)):
            curves = [loss_decreases(result, findings.base, list(texts)) for result in one.results]
            paths.append([sign * statistics.fmean(point) for point in zip(*curves, strict=True)][first:])
        (xs, ys) = paths
        color = f"C{number % 10}"
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
    """Return a record per variant: size, its runs, how many of them are null controls', and runs done."""
    records = []
    for one in variants:
        own, controls = count_runs(one, comparison)
        _, searches, others = (read_results(runs, comparison) for runs in find_stages(comparison, [one]))
        baseline = "LoRA" if one.train.get("adapters") else "the base"
        record = {"variant": one.name, "method": baseline if one.upscale is None else one.upscale["method"]}
        record |= {"new_parameters": one.new_parameters, "trained_parameters": one.trained_parameters}
        record |= {"rates": [*map(rate_name, one.rates)], "runs": own + controls, "null_controls": controls}
        records.append({**record, "done": len(searches) + len(others)})
    return records


def plan_table(records: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return the plan as a table, a row per record; numbers that only training knows are empty."""
    rows = []
    for one in records:
        row = {**one, "rates": ", ".join(one["rates"]), "done": f"{one['done']} of {one['runs']}"}
        words = [f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()]
        rows.append(["" if cell is None else cell for cell in words])
    head = "variant,method,new parameters,trained parameters,rates,runs,of null controls,done".split(",")
    return TextTable("Each rate with the first seed, the best rate with the others and with null controls", head, rows)


def as_json(findings: Findings, report: Path) -> dict[str, Any]:
    """Return the findings as a JSON object, with all results of variants and their null controls."""
    told = {"base_losses": findings.base.losses, "cautions": cautions(findings), "advice": advice(findings)}
    return {**dataclasses.asdict(findings), **told, "report": str(report)}


def write_report(root: Path, findings: Findings) -> Path:
    """Write `report.md`, and `frontier.png` with matplotlib if both kinds of texts were measured; return the report's path."""
    comparison = findings.comparison
    picture = root / "frontier.png"
    report = root / "report.md"
    picture.unlink(missing_ok=True)  # of an earlier report
    has_both = findings.variants and comparison.domain and comparison.retention
    if has_both and importlib.util.find_spec("matplotlib") is not None:
        with atomic_write(picture) as partial:
            partial.write_bytes(draw(findings))
    sentences = "\n".join(f"- {each}" for each in [*cautions(findings), *advice(findings)])
    write_text(report, f"{variants_table(findings).markdown()}\n\n{sentences}\n")
    return report
