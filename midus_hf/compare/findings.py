"""Findings of a comparison: what each variant learned and forgot at its rate, by seed; and advice."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from midus_hf.compare.plan import SHUFFLED, Comparison, Rate, rate_name
from midus_hf.compare.run import Result

# Student's t at 0.975 for 1 to 10 degrees of freedom; more take the last, which makes intervals wider.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# Numbers of parameters are equal if they differ at most by this share.
_EQUAL_SHARE = 0.1


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


def paired(lower: Mapping[int, float], higher: Mapping[int, float]) -> Spread | None:
    """Return the spread of `higher - lower` over the seeds that both have; None if they share no seed."""
    return spread([higher[seed] - lower[seed] for seed in sorted(set(lower) & set(higher))])


def verdict(advantage: Spread) -> str:
    """Return in words whether a variant beats a null control: its 95 % interval of advantage is above 0."""
    if advantage.mean <= 0:
        return "does not beat it"
    if advantage.half_interval is None:
        return "one seed"
    return "beats it" if advantage.mean > advantage.half_interval else "is not shown to beat it"


def mean_loss(losses: Mapping[str, float], texts: Sequence[str]) -> float:
    """Return the mean loss of some texts, in nats per token, unweighted."""
    return statistics.fmean(losses[name] for name in texts)


def chosen_rate(searches: Sequence[Result], validation: Sequence[str]) -> Rate | None:
    """Return the rate with the lowest final validation loss, the first of equals; None without results."""
    if len(searches) < 2:
        return searches[0].rate if searches else None
    return min(searches, key=lambda one: mean_loss(one.losses, validation)).rate


@dataclasses.dataclass(frozen=True, eq=False)
class VariantFindings:
    """Findings about one variant, at the rate that the validation texts chose, in nats per token.

    `results` has one result per seed, `controls` those of null controls. `advantages` are differences of final domain loss to each
    null control over shared seeds; for `shuffled-addresses`, the rise when values are permuted. Learned is the decrease of the
    domain's mean loss, forgotten the increase on `retention`; None without texts.
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
    """Findings of a comparison, from which reports are written.

    `variants` with a chosen rate are sorted by domain loss, or without domain texts as in the comparison. `failures` has reasons by
    run; `missing` counts runs that are not done, including null controls.
    """

    comparison: Comparison
    base: Result
    variants: Sequence[VariantFindings]
    failures: Mapping[str, str]
    missing: int

    @property
    def reference(self) -> VariantFindings | None:
        """The variant that learned most, subtracted from others; None without domain texts or results."""
        learned = {one: one.learned.mean for one in self.variants if one.learned is not None}
        return max(learned, key=lambda one: learned[one], default=None)


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
    variants = [_find_variant(name, comparison, base, results) for name in comparison.variants]
    able = [variant for variant in variants if variant is not None]
    able.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    return Findings(comparison, base, able, failures, missing)


def _find_variant(
    name: str, comparison: Comparison, base: Result, results: Sequence[Result]
) -> VariantFindings | None:
    domain, retention = list(comparison.domain), list(comparison.retention)
    own = [result for result in results if result.variant == name]
    chosen = chosen_rate([one for one in own if one.seed == comparison.seeds[0]], list(comparison.validation))
    if chosen is None:
        return None
    rate = rate_name(chosen)
    best = [result for result in own if rate_name(result.rate) == rate]
    controls = [result for result in results if result.control_of == name and rate_name(result.rate) == rate]
    ends = {result.seed: mean_loss(result.losses, domain) for result in best if domain}
    learned = {result.seed: loss_decreases(result, base, domain)[-1] for result in best if domain}
    forgotten = {result.seed: -loss_decreases(result, base, retention)[-1] for result in best if retention}
    losses: dict[str, dict[int, float]] = {}
    for result in controls if domain else ():
        losses.setdefault(str(result.control), {})[result.seed] = mean_loss(result.losses, domain)
    leads = {control: paired(ends, by_seed) for control, by_seed in losses.items()}
    measured = [(one.shuffled, one.saved) for one in best if domain and one.shuffled and one.saved]
    leads[SHUFFLED] = spread([mean_loss(shuffled, domain) - mean_loss(saved, domain) for shuffled, saved in measured])
    advantages = {control: lead for control, lead in leads.items() if lead is not None}
    spreads = [spread(list(by_seed.values())) for by_seed in (ends, learned, forgotten)]
    return VariantFindings(name, rate, best, controls, learned, forgotten, advantages, *spreads)


def differences(findings: Findings) -> dict[str, tuple[Spread, Spread | None]]:
    """Return how much more each variant learned and forgot than the reference, over shared seeds."""
    best = findings.reference
    return {
        one.name: (learned, paired(best.forgotten_by_seed, one.forgotten_by_seed))
        for one in findings.variants
        if best is not None and one is not best and (learned := paired(best.learned_by_seed, one.learned_by_seed))
    }


def cautions(findings: Findings) -> list[str]:
    """Return sentences on what keeps numbers from being compared, and on runs that are not done."""
    variants = findings.variants
    reasons: dict[str, list[str]] = {
        "Fewer than three seeds": [f"{one.name} {len(one.results)}" for one in variants if len(one.results) < 3],
        "Best rate at an end of its list": [f"{one.name} {one.rate}" for one in variants if _is_at_end(findings, one)],
        "Not causal, so losses cannot be compared": [one.name for one in variants if not one.is_causal],
        "Failed": [*findings.failures],
        "Runs that are not done": [str(findings.missing)] if findings.missing else [],
    }
    return [f"{reason}: {', '.join(names)}." for reason, names in reasons.items() if names]


def _is_at_end(findings: Findings, variant: VariantFindings) -> bool:
    rates = findings.comparison.rates_of(variant.name)
    (chosen,) = (rate for rate in rates if rate_name(rate) == variant.rate)
    searched = {key: {rate[key] for rate in rates if key in rate} for key in chosen}
    return any(len(values) > 1 and chosen[key] in (min(values), max(values)) for key, values in searched.items())


def advice(findings: Findings) -> list[str]:
    """Return three sentences: the best at equal parameters, what forgets least, and what was too close."""
    learned = {one: one.learned.mean for one in findings.variants if one.is_causal and one.learned is not None}
    able = [one for one, mean in learned.items() if mean > 0]
    sizes = {one: one.results[0].trained_parameters for one in able}
    groups = [
        [each for each in able if abs(sizes[each] - sizes[one]) <= _EQUAL_SHARE * max(sizes[each], sizes[one])]
        for one in able
    ]
    unclear: list[str] = []
    take = "At equal parameters: no two variants that learned have as many (within 10 %)."
    if group := max((each for each in groups if len(each) > 1), key=len, default=None):
        best = max(group, key=lambda one: learned[one])
        take = f"At equal parameters ({short_count(sizes[best])}), take {best.name}: it learned most of {len(group)}, "
        take += f"{learned[best]:.4f} nats per token."
        losses = {one: {seed: -value for seed, value in one.learned_by_seed.items()} for one in group}
        unclear += _unclear(f"{best.name} learned more than", best, losses)
    forgotten = {one: one.forgotten.mean for one in able if one.forgotten is not None}
    forgets = "Forgets least: no variant that learned was measured on text outside the domain."
    if forgotten:
        least = min(forgotten, key=lambda one: forgotten[one])
        forgets = f"Forgets least: {least.name}, {forgotten[least]:+.4f} nats per token, and it learned {learned[least]:.4f}."
        unclear += _unclear(f"{least.name} forgot less than", least, {one: one.forgotten_by_seed for one in forgotten})
    for one in able:
        known = {name: verdict(advantage) for name, advantage in one.advantages.items()}
        names = [name for name, words in known.items() if words in ("one seed", "is not shown to beat it")]
        unclear += [f"{one.name} beats {', '.join(names)}"] if names else []
    too_few = f" whether {'; '.join(unclear)}." if unclear else ": nothing of the above."
    return [take, forgets, f"Too few seeds to tell{too_few}"]


def _unclear(claim: str, best: VariantFindings, values: Mapping[VariantFindings, Mapping[int, float]]) -> list[str]:
    """Return a claim and the variants without proof: their 95 % interval above the best includes 0."""
    leads = {one.name: paired(values[best], by_seed) for one, by_seed in values.items() if one is not best}
    names = [name for name, lead in leads.items() if lead is None or verdict(lead) != "beats it"]
    return [f"{claim} {', '.join(names)}"] if names else []


def short_count(number: int) -> str:
    """Return a count, 0 or more, as short text of three significant digits: `8.89M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
