"""Findings of a comparison: what each variant learned and forgot at its chosen rate, by seed, and caveats."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from midus_hf.compare.options import Comparison, Rate, rate_name
from midus_hf.compare.origins import KINDS, short
from midus_hf.compare.runs import Result
from midus_hf.compare.variants import SHUFFLED

# Keys of `midus train` that change the loss of a text, with their defaults; None for `bf16` depends on the device.
_READING = {"document_mask": False, "path_column": None, "text_column": "text", "bf16": None, "fp16": False}
# Student's t at 0.975 for 1 to 10 degrees of freedom; the last is used for more, which makes intervals wider.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of the numbers of several seeds; a single number has no deviation."""

    mean: float
    deviation: float | None
    count: int

    @property
    def half_interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean, by Student's t; None for a single number."""
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
    """Return in words whether a variant beats a null control: whether the 95 % interval of its advantage in loss is above 0."""
    if advantage.mean <= 0:
        return "does not beat it"
    if advantage.half_interval is None:
        return "one seed"
    return "beats it" if advantage.mean > advantage.half_interval else "is not shown to beat it"


def mean_loss(losses: Mapping[str, float], texts: Sequence[str]) -> float:
    """Return the mean loss of some texts, in nats per token; each text has the same weight."""
    return statistics.fmean(losses[name] for name in texts)


def chosen_rate(searches: Sequence[Result], validation: Sequence[str]) -> Rate | None:
    """Return the rate with the lowest final mean loss on the validation texts, from one result per rate; the first of equal ones.

    Losses that are not finite do not count; None if there are no others. A single rate needs no validation texts.
    """
    if len(searches) == 1 and not validation:
        return searches[0].rate
    finite = [(loss, one.rate) for one in searches if math.isfinite(loss := mean_loss(one.losses, validation))]
    return min(finite, key=lambda each: each[0], default=(0.0, None))[1]


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """Findings about one variant, at the rate that the validation texts chose, in nats per token.

    `results` are its results at this rate, one per seed, `controls` those of its null controls, and `rates` names the rates with
    results. `ends` are mean final losses of the domain by seed, `learned_by_seed` the decrease of this loss, `forgotten_by_seed` the
    increase on the retention texts. `advantages` are the differences of final domain loss to each null control, over
    the seeds that both have; for `shuffled-addresses`, by how much it rises when the variant's values are permuted. `domain_loss`,
    `learned` and `forgotten` are spreads; None without texts.
    """

    name: str
    rate: str
    rates: Sequence[str]
    results: Sequence[Result]
    controls: Sequence[Result]
    ends: Mapping[int, float]
    learned_by_seed: Mapping[int, float]
    forgotten_by_seed: Mapping[int, float]
    advantages: Mapping[str, Spread]
    domain_loss: Spread | None
    learned: Spread | None
    forgotten: Spread | None

    @property
    def is_certified(self) -> bool:
        """True if the trained model of every seed came with a certificate of protected texts."""
        return all(result.is_certified for result in self.results)


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings of a comparison, from which reports are written.

    `base_losses` are the losses of the base, as runs measure them. `variants` are sorted by their loss of the domain; without domain
    texts they are in the order of the comparison, and variants without a chosen rate are left out. `failures` has reasons by run,
    and `missing` is the number of runs that are not done, including null controls if their variant has a rate.
    """

    comparison: Comparison
    base: Result
    base_losses: Mapping[str, float]
    variants: Sequence[VariantFindings]
    failures: Mapping[str, str]
    missing: int

    @property
    def reference(self) -> VariantFindings | None:
        """Return the variant that others are subtracted from, the one that learned most; None without domain texts or results."""
        able = [(one.learned.mean, one) for one in self.variants if one.learned is not None]
        return max(able, key=lambda each: each[0])[1] if able else None

    def falls(self, result: Result, texts: Sequence[str]) -> list[float]:
        """Return the decrease of the mean loss of some texts at each point of a run's curve, in nats per token.

        It is relative to the run's start, or to the base if the upscaled model was not verified to compute the same as the base:
        regaining what upscaling lost is not learning.
        """
        origin = self.base_losses if result.starts_elsewhere else result.start.losses
        return [mean_loss(origin, texts) - mean_loss(point.losses, texts) for point in result.curve]


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings of a comparison from its results; those of null controls count only at the chosen rate of their variant."""
    # A run that starts at the base and reads texts like all others has measured the base, in the precision of training and with
    # paths.
    reading = _reading(comparison.train)
    starts = [
        one.start.losses
        for one in results
        if one.curve and not one.starts_elsewhere and _reading(one.request.get("train")) == reading
    ]
    without_variants = Findings(comparison, base, (starts or [base.losses])[0], [], failures, missing)
    variants = [_variant_findings(name, without_variants, results) for name in comparison.variants]
    able = [variant for variant in variants if variant is not None]
    able.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    return dataclasses.replace(without_variants, variants=able)


def _variant_findings(name: str, findings: Findings, results: Sequence[Result]) -> VariantFindings | None:
    """Return the findings about a variant; None if none of its runs with the first seed ended at a finite number."""
    comparison = findings.comparison
    domain, retention = list(comparison.domain), list(comparison.retention)
    of_variant = [result for result in results if result.variant == name]
    searches = [result for result in of_variant if result.seed == comparison.seeds[0]]
    chosen = chosen_rate(searches, list(comparison.validation))
    if chosen is None:
        return None
    rate = rate_name(chosen)
    best = [result for result in of_variant if rate_name(result.rate) == rate]
    controls = [result for result in results if result.control_of == name and rate_name(result.rate) == rate]
    ends = {result.seed: mean_loss(result.losses, domain) for result in best if domain}
    learned = {result.seed: findings.falls(result, domain)[-1] for result in best if domain}
    forgotten = {result.seed: -findings.falls(result, retention)[-1] for result in best if retention}
    rates = list(dict.fromkeys(rate_name(result.rate) for result in of_variant))
    losses: dict[str, dict[int, float]] = {}
    for result in controls if domain else ():
        losses.setdefault(str(result.control), {})[result.seed] = mean_loss(result.losses, domain)
    lower = {control: paired(ends, by_seed) for control, by_seed in losses.items()}
    saved = {result.seed: mean_loss(result.saved, domain) for result in best if domain and result.saved}
    shuffled = {result.seed: mean_loss(result.shuffled, domain) for result in best if domain and result.shuffled}
    lower[SHUFFLED] = paired(saved, shuffled)
    advantages = {control: advantage for control, advantage in lower.items() if advantage is not None}
    spreads = [spread(list(by_seed.values())) for by_seed in (ends, learned, forgotten)]
    return VariantFindings(name, rate, rates, best, controls, ends, learned, forgotten, advantages, *spreads)


def cautions(findings: Findings) -> list[str]:
    """Return sentences on differences between variants other than their methods, and on runs that are not done."""
    variants, comparison = findings.variants, findings.comparison
    listed = {one.name: [rate_name(rate) for rate in comparison.rates_of(one.name)] for one in variants}
    lacking = {one.name: [rate for rate in listed[one.name] if rate not in one.rates] for one in variants}
    tokens = {one.name: f"{max(result.tokens for result in one.results):,}" for one in variants}
    trained = {one.name: one.results[0].request.get("train") or {} for one in variants}
    readings = {name: _reading(keys) for name, keys in trained.items()}
    whole = [name for name, keys in trained.items() if keys.get("trainable") == "all" and not keys.get("adapters")]
    sizes = {one.name: one.results[0].trained_parameters for one in variants if one.name not in whole}
    median = statistics.median(sizes.values() or [0])
    far = {name: size for name, size in sizes.items() if abs(size - median) > 0.1 * median}
    apart = "Trained parameters more than 10 % off the median of variants that do not train everything"
    reasons: dict[str, Mapping[str, str]] = {
        "Fewer than three seeds": {one.name: f"{len(one.results)}" for one in variants if len(one.results) < 3},
        "Best rate at an end of its list": {one.name: one.rate for one in variants if _is_at_an_end(findings, one)},
        "Not causal, so losses cannot be compared": {
            one.name: "" for one in variants if not all(result.is_causal for result in one.results)
        },
        "Texts read in different ways": _differing({"base": _reading(comparison.train), **readings}),
        "Rates without a result": {name: " and ".join(missing) for name, missing in lacking.items() if missing},
        "Unequal numbers of rates": _differing({one.name: str(len(one.rates)) for one in variants}),
        "Unequal numbers of tokens": _differing(tokens),
        apart: {name: f"{size:,} of {median:,.0f}" for name, size in far.items()},
        **{f"Different {kind}": _differing(_origins(findings, kind)) for kind in KINDS},
    }
    sentences = [
        f"{reason}: {', '.join(f'{name} {detail}'.strip() for name, detail in names.items())}."
        for reason, names in reasons.items()
        if names
    ]
    if findings.missing:
        failed = f", of which {len(findings.failures)} failed" if findings.failures else ""
        upscaled = {name for name, options in comparison.variants.items() if options.upscale is not None}
        if comparison.controls and not upscaled <= listed.keys():
            failed += "; null controls of variants without a rate are not counted yet"
        sentences.append(f"Runs that are not done: {findings.missing}{failed}.")
    return sentences


def shared_origin(findings: Findings) -> str:
    """Return a sentence on the data, base, code and machine that all rows share; empty if they share none."""
    origins = {kind: _origins(findings, kind) for kind in KINDS}
    shared = [f"{kind} {by_row['base']}" for kind, by_row in origins.items() if not _differing(by_row)]
    return f"All rows were made with {'; '.join(shared)}." if shared else ""


def _differing(by_row: Mapping[str, str]) -> Mapping[str, str]:
    """Return a description by row if it differs between rows; else nothing."""
    return by_row if len(set(by_row.values())) > 1 else {}


def _reading(train: Any) -> str:
    """Return how a run with these keys of `midus train`, if any, reads texts and computes, in words."""
    keys = {key: (train or {}).get(key) for key in _READING}
    set_ones = [f"{key}={value}" for key, value in keys.items() if value not in (None, _READING[key])]
    return ", ".join(set_ones) or "by default"


def _origins(findings: Findings, kind: str) -> dict[str, str]:
    """Return what the base, and the runs of each variant and its null controls, were made with."""
    rows = {"base": [findings.base], **{one.name: [*one.results, *one.controls] for one in findings.variants}}
    return {name: " and ".join(dict.fromkeys(short(kind, one.origin) for one in of)) for name, of in rows.items()}


def _is_at_an_end(findings: Findings, variant: VariantFindings) -> bool:
    """Return whether the chosen rate has the highest or the lowest value of a key that was searched."""
    rates = findings.comparison.rates_of(variant.name)
    (chosen,) = (rate for rate in rates if rate_name(rate) == variant.rate)
    searched = {key: {rate[key] for rate in rates if key in rate} for key in chosen}
    return any(len(values) > 1 and chosen[key] in (min(values), max(values)) for key, values in searched.items())
