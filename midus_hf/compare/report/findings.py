"""Findings of a comparison: its results per variant, with the numbers that reports show."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from midus_hf.compare.learning import (
    Spread,
    Verdict,
    best_rate,
    by_rate,
    falls,
    in_words,
    mean_loss,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison, PaperOptions, Rate, rate_name
from midus_hf.compare.results import Result
from midus_hf.compare.variants import SHUFFLED

# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match")
# The metric of tasks that measure the perplexity of a text.
_WORD_PERPLEXITY = "word_perplexity"


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """Findings about one variant, with its results at all rates and seeds.

    `rate` names the rate at which the loss of the domain ended lowest.
    """

    name: str
    base: Result
    results: Sequence[Result]
    rate: str
    domain: Sequence[str]
    retention: Sequence[str]

    @property
    def best(self) -> Sequence[Result]:
        """Results at the best rate, one per seed."""
        return by_rate(self.results)[self.rate]

    @property
    def ends(self) -> Mapping[int, float]:
        """Mean final loss of the domain texts at the best rate, by seed, in nats per token."""
        return {result.seed: mean_loss(result.end, self.domain) for result in self.best}

    @property
    def domain_loss(self) -> Spread:
        """Mean and spread of `ends` over seeds."""
        return spread(list(self.ends.values()))

    @property
    def learned(self) -> Spread:
        """Nats per token by which the mean loss of the domain fell, counted from `origin`; mean and spread over seeds."""
        return spread([falls(one, self.base, self.domain)[-1] for one in self.best])

    @property
    def forgotten(self) -> Spread | None:
        """Nats per token by which the mean loss of the retention texts rose, counted from `origin`; None without these texts."""
        if not self.retention:
            return None
        return spread([-falls(one, self.base, self.retention)[-1] for one in self.best])

    @property
    def starts_elsewhere(self) -> bool:
        """True if, for any seed at the best rate, the model was not verified to start from what the base computes."""
        return any(result.upscaled is not None for result in self.best)

    @property
    def is_causal(self) -> bool:
        """True if every loss at the best rate is of tokens predicted from earlier tokens alone."""
        return all(result.is_causal for result in self.best)

    @property
    def tokens(self) -> float:
        """Number of tokens trained on at the best rate, the mean over seeds."""
        return statistics.fmean(result.tokens for result in self.best)

    @property
    def rates(self) -> list[Rate]:
        """Rates that the variant has results at, in the order of its results."""
        return [results[0].rate for results in by_rate(self.results).values()]

    @property
    def is_at_an_end_of_its_rates(self) -> bool:
        """True if a number of the best rate is the least or the greatest of several that were tried for its key."""
        tried = [[rate[key] for rate in self.rates if key in rate] for key in self.best[0].rate]
        best = list(self.best[0].rate.values())
        return any(
            len(set(numbers)) > 1 and number in (min(numbers), max(numbers))
            for number, numbers in zip(best, tried, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings of a comparison, which reports are written from.

    `variants` are in the order of the comparison, `controls` results of null controls by the names of their variant and of the null
    control, `failures` why runs failed, by name, and `missing` the number of runs that are not done, of null controls too.
    """

    comparison: Comparison
    base: Result
    variants: Mapping[str, VariantFindings]
    controls: Mapping[str, Mapping[str, Sequence[Result]]]
    failures: Mapping[str, str]
    missing: int

    @property
    def domain(self) -> list[str]:
        """Names of the domain texts."""
        return list(self.comparison.domain)

    @property
    def retention(self) -> list[str]:
        """Names of the retention texts."""
        return list(self.comparison.retention)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return [] if self.comparison.tasks is None else list(self.comparison.tasks.names)

    @property
    def ranked(self) -> list[VariantFindings]:
        """Variants by rising loss of the domain; without domain texts, in the order of the comparison."""
        variants = list(self.variants.values())
        return sorted(variants, key=lambda variant: variant.domain_loss.mean) if self.domain else variants

    def verdicts(self, variant: str) -> list[Verdict]:
        """Return a verdict on a variant and each of its null controls: first the trained ones, then shuffled addresses.

        Null controls that share no seed with the variant are left out.
        """
        if not self.domain:
            return []
        own = self.variants[variant].ends
        compared = [
            verdict(control, own, {result.seed: mean_loss(result.end, self.domain) for result in results})
            for control, results in self.controls.get(variant, {}).items()
        ]
        rises = [
            statistics.fmean(result.shuffled[name] - result.saved[name] for name in self.domain)
            for result in self.variants[variant].best
            if result.shuffled is not None and result.saved is not None
        ]
        if rises:
            rise = spread(rises)
            outcomes = ("its addresses matter", "its addresses do not matter", "its addresses are not shown to matter")
            compared.append(Verdict(SHUFFLED, rise, in_words(rise, *outcomes)))
        return [one for one in compared if one is not None]


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings of a comparison from its results.

    Results of null controls count only at the best rate of their variant.
    """
    domain, retention = list(comparison.domain), list(comparison.retention)
    variants = {}
    controls: dict[str, dict[str, list[Result]]] = {}
    for name in comparison.variants:
        own = [result for result in results if result.variant == name]
        if own:
            rate = rate_name(best_rate(own, domain))
            variants[name] = VariantFindings(name, base, own, rate, domain, retention)
    for result in results:
        if (
            result.control is not None
            and result.control_of in variants
            and rate_name(result.rate) == variants[result.control_of].rate
        ):
            controls.setdefault(result.control_of, {}).setdefault(result.control, []).append(result)
    return Findings(comparison, base, variants, controls, failures, missing)


def metric_of(metrics: Mapping[str, float]) -> float | None:
    """Return the metric of a task that reports show, from 0 to 1: the first of acc_norm, acc and exact_match; None if it has none."""
    return next((metrics[name] for name in _METRICS if name in metrics), None)


def paper_number(paper: PaperOptions, column: str, result: Result, tuned: bool = False) -> float | None:
    """Return the number of a result in a column of a paper's table: per cent, or a perplexity; None if it was not measured."""
    measured = result.end_of(tuned)
    if measured is None:
        return None
    subject = paper.columns[column]
    if subject is None:
        shares = [metric_of(measured.tasks.get(name or "", {})) for name in paper.columns.values()]
        known = [100 * share for share in shares if share is not None]
        return statistics.fmean(known) if known else None
    if subject in measured.losses:
        return math.exp(measured.losses[subject])
    metrics = measured.tasks.get(subject, {})
    share = metric_of(metrics)
    return metrics.get(_WORD_PERPLEXITY) if share is None else 100 * share
