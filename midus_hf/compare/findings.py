"""Findings of a comparison: what each variant learned and forgot at its chosen rate, by seed, and what to be careful with."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from midus_hf.compare.options import Comparison, Rate, rate_name
from midus_hf.compare.origins import KINDS, short
from midus_hf.compare.results import Result
from midus_hf.compare.variants import SHUFFLED

# Seeds below which a spread says little.
_ENOUGH_SEEDS = 3
# Share of the median by which numbers of trained parameters may differ from it.
_SHARE = 0.1
# Keys of `midus train` that change what the loss of a text is, with their defaults; None of `bf16` is what the device can.
_READING = {"document_mask": False, "path_column": None, "text_column": "text", "bf16": None, "fp16": False}
# Student's t at 0.975 for 1 to 10 degrees of freedom; more take the last, which makes intervals wider.
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
    """Return in words whether a variant beats a null control, over whose loss it has this advantage.

    It does where the 95 % interval of the mean lies above 0, and does not where the mean is 0 or below.
    """
    if advantage.mean <= 0:
        return "does not beat it"
    if advantage.half_interval is None:
        return "one seed"
    return "beats it" if advantage.mean > advantage.half_interval else "is not shown to beat it"


def mean_loss(losses: Mapping[str, float], texts: Sequence[str]) -> float:
    """Return the mean loss of some texts, in nats per token; each text has the same weight."""
    return statistics.fmean(losses[name] for name in texts)


def chosen_rate(searches: Sequence[Result], validation: Sequence[str]) -> Rate | None:
    """Return the rate at which the mean loss of the validation texts ended lowest; of equal rates, the first.

    A rate whose loss ended at no finite number is not chosen. A single rate needs no validation texts.

    Args:
        searches: Results of a variant's runs with the first seed, one per rate.
        validation: Names of the validation texts.

    Returns:
        The rate; None if no run ended at a finite number.
    """
    if len(searches) == 1 and not validation:
        return searches[0].rate
    losses = [(mean_loss(result.losses, validation), result.rate) for result in searches]
    finite = [(loss, rate) for loss, rate in losses if math.isfinite(loss)]
    return min(finite, key=lambda each: each[0])[1] if finite else None


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """Findings about one variant, at the rate that the validation texts chose, in nats per token.

    `results` are its results at this rate, one per seed, `controls` the results of its null controls, and `rates` names the
    rates with results. `ends` are mean final losses of the domain by seed. `learned_by_seed` is what the loss of the domain fell
    by, `forgotten_by_seed` what the loss of the retention texts rose by; they are empty without these texts. `advantages` say how far
    the loss of the domain ended below that of each null control, over the seeds that both have; for `shuffled-addresses`, by how much
    it rises when the variant's values are permuted. `domain_loss`, `learned` and `forgotten` are their spreads; None without texts.
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
    """Findings of a comparison, which reports are written from.

    `base_losses` are the losses of the base, as runs measure them. `variants` rise by their loss of the domain; without domain texts
    they are in the order of the comparison, and variants without a chosen rate are left out. `failures` say why runs failed, by name,
    and `missing` is the number of runs that are not done, of null controls too where their variant has a rate.
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
        able = [one for one in self.variants if one.learned is not None]
        return max(able, key=lambda one: 0.0 if one.learned is None else one.learned.mean) if able else None

    def falls(self, result: Result, texts: Sequence[str]) -> list[float]:
        """Return how far the mean loss of some texts has fallen at each point of a run's curve, in nats per token.

        It falls from the run's own start, or from the base where the upscaled model was not seen to compute what the base computes:
        to regain what upscaling lost is not learning.
        """
        origin = self.base_losses if result.starts_elsewhere else result.start.losses
        return [mean_loss(origin, texts) - mean_loss(point.losses, texts) for point in result.curve]


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings of a comparison from its results.

    Results of null controls count only at the chosen rate of their variant.
    """
    # A run that starts at the base and reads texts as all do measured the base, in the precision of training and with paths of texts.
    reading = _reading(comparison.train)
    starts = [
        one.start.losses
        for one in results
        if one.curve and not one.starts_elsewhere and _reading(one.request.get("train")) == reading
    ]
    base_losses = base.losses if comparison.stages or not starts else starts[0]
    without_variants = Findings(comparison, base, base_losses, [], failures, missing)
    variants = [_variant_findings(name, without_variants, results) for name in comparison.variants]
    able = [variant for variant in variants if variant is not None]
    able.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    return dataclasses.replace(without_variants, variants=able)


def _variant_findings(name: str, findings: Findings, results: Sequence[Result]) -> VariantFindings | None:
    """Return the findings about a variant; None if none of its runs with the first seed ended at a finite number."""
    comparison = findings.comparison
    domain, retention = list(comparison.domain), list(comparison.retention)
    own = [result for result in results if result.variant == name]
    searches = [result for result in own if result.seed == comparison.seeds[0]]
    chosen = chosen_rate(searches, list(comparison.validation))
    if chosen is None:
        return None
    best = [result for result in own if rate_name(result.rate) == rate_name(chosen)]
    ends = {result.seed: mean_loss(result.losses, domain) for result in best} if domain else {}
    controls = [
        result for result in results if result.control_of == name and rate_name(result.rate) == rate_name(chosen)
    ]
    learned = {result.seed: findings.falls(result, domain)[-1] for result in best} if domain else {}
    forgotten = {result.seed: -findings.falls(result, retention)[-1] for result in best} if retention else {}
    return VariantFindings(
        name=name,
        rate=rate_name(chosen),
        rates=list(dict.fromkeys(rate_name(result.rate) for result in own)),
        results=best,
        controls=controls,
        ends=ends,
        learned_by_seed=learned,
        forgotten_by_seed=forgotten,
        advantages=_advantages(best, ends, controls, domain) if domain else {},
        domain_loss=spread(list(ends.values())),
        learned=spread(list(learned.values())),
        forgotten=spread(list(forgotten.values())),
    )


def _advantages(
    results: Sequence[Result], ends: Mapping[int, float], controls: Sequence[Result], domain: Sequence[str]
) -> dict[str, Spread]:
    """Return the advantage of a variant over each null control that shares a seed with it: trained ones first, then shuffled."""
    losses: dict[str, dict[int, float]] = {}
    for result in controls:
        assert result.control is not None
        losses.setdefault(result.control, {})[result.seed] = mean_loss(result.losses, domain)
    advantages = {control: paired(ends, by_seed) for control, by_seed in losses.items()}
    saved = {result.seed: mean_loss(result.saved, domain) for result in results if result.saved is not None}
    shuffled = {result.seed: mean_loss(result.shuffled, domain) for result in results if result.shuffled is not None}
    advantages[SHUFFLED] = paired(saved, shuffled)
    return {control: advantage for control, advantage in advantages.items() if advantage is not None}


def cautions(findings: Findings) -> list[str]:
    """Return sentences on what variants differ in beside their methods, and on runs that are not done."""
    variants = findings.variants
    reasons = {
        "Fewer than three seeds": {
            variant.name: f"{len(variant.results)}" for variant in variants if len(variant.results) < _ENOUGH_SEEDS
        },
        "Best rate at an end of its list": {
            variant.name: variant.rate for variant in variants if _is_at_an_end(findings, variant)
        },
        "Not causal, so that losses cannot be compared": {
            variant.name: "" for variant in variants if not all(result.is_causal for result in variant.results)
        },
        "Texts read in different ways": _differing(
            {
                "base": _reading(findings.comparison.train),
                **{variant.name: _reading(variant.results[0].request.get("train")) for variant in variants},
            }
        ),
        "Rates without a result": {
            variant.name: " and ".join(lacking)
            for variant in variants
            if (lacking := _rates_without(findings, variant))
        },
        "Unequal numbers of rates": _differing({variant.name: str(len(variant.rates)) for variant in variants}),
        "Unequal numbers of tokens": _differing(
            {variant.name: f"{max(result.tokens for result in variant.results):,}" for variant in variants}
        ),
        "Trained parameters more than 10 % off the median of variants that do not train all": _unlike_the_median(
            variants
        ),
        **{f"Different {kind}": _differing(_origins(findings, kind)) for kind in KINDS},
    }
    sentences = [
        f"{reason}: {', '.join(f'{name} {detail}'.strip() for name, detail in names.items())}."
        for reason, names in reasons.items()
        if names
    ]
    if findings.missing:
        failed = f", of which {len(findings.failures)} failed" if findings.failures else ""
        sentences.append(f"Runs that are not done: {findings.missing}{failed}{_uncounted(findings)}.")
    return sentences


def _uncounted(findings: Findings) -> str:
    """Return what is not counted among runs that are not done: null controls of upscaled variants whose rate is not chosen yet."""
    have_rates = {variant.name for variant in findings.variants}
    upscaled = {name for name, options in findings.comparison.variants.items() if options.upscale is not None}
    is_complete = upscaled <= have_rates or not findings.comparison.controls
    return "" if is_complete else "; null controls of variants without a rate are not counted yet"


def shared_origin(findings: Findings) -> str:
    """Return a sentence on the data, base, code and machine that all rows share; empty if they share none."""
    origins = {kind: _origins(findings, kind) for kind in KINDS}
    shared = [f"{kind} {by_row['base']}" for kind, by_row in origins.items() if not _differing(by_row)]
    return f"All rows were made with {'; '.join(shared)}." if shared else ""


def _differing(by_row: Mapping[str, str]) -> Mapping[str, str]:
    """Return what is said of each row if it is not the same of all; else nothing."""
    return by_row if len(set(by_row.values())) > 1 else {}


def _reading(train: Any) -> str:
    """Return how a run with these keys of `midus train`, if any, reads texts and computes, in words."""
    keys = {key: (train or {}).get(key) for key in _READING}
    set_ones = [f"{key}={value}" for key, value in keys.items() if value not in (None, _READING[key])]
    return ", ".join(set_ones) or "by default"


def _rates_without(findings: Findings, variant: VariantFindings) -> list[str]:
    """Return the names of a variant's rates that have no result."""
    return [name for name in map(rate_name, findings.comparison.rates_of(variant.name)) if name not in variant.rates]


def _unlike_the_median(variants: Sequence[VariantFindings]) -> dict[str, str]:
    """Return the trained parameters of variants that are far from the median of the variants that do not train all."""
    counts = {
        variant.name: variant.results[0].trained_parameters
        for variant in variants
        if not variant.results[0].trains_all
    }
    median = statistics.median(counts.values() or [0])
    return {
        name: f"{count:,} of {median:,.0f}" for name, count in counts.items() if abs(count - median) > _SHARE * median
    }


def _origins(findings: Findings, kind: str) -> dict[str, str]:
    """Return what the base, and the runs of each variant and its null controls, were made with."""
    rows = {
        "base": [findings.base],
        **{variant.name: [*variant.results, *variant.controls] for variant in findings.variants},
    }
    return {
        name: " and ".join(dict.fromkeys(short(kind, result.origin) for result in results))
        for name, results in rows.items()
    }


def _is_at_an_end(findings: Findings, variant: VariantFindings) -> bool:
    """Return whether the chosen rate has the highest or the lowest value of a key that was searched."""
    rates = findings.comparison.rates_of(variant.name)
    (chosen,) = (rate for rate in rates if rate_name(rate) == variant.rate)
    searched = {key: {rate[key] for rate in rates if key in rate} for key in chosen}
    return any(len(values) > 1 and chosen[key] in (min(values), max(values)) for key, values in searched.items())
