"""Findings of a comparison: its results per variant, with the numbers that reports show."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from functools import partial

from midus_hf.compare.learning import (
    Spread,
    Verdict,
    best_rate,
    by_rate,
    forgotten_at,
    in_words,
    mean_loss,
    origin,
    path,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison, Rate, rate_name
from midus_hf.compare.results import Result
from midus_hf.compare.variants import SHUFFLED

# Metrics of a task in order of preference: reports show the first that the task has.
_METRICS = ("acc_norm", "acc", "exact_match")


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
        return spread(self.learned_by_seed)

    @property
    def learned_by_seed(self) -> list[float]:
        """Nats per token by which the mean loss of the domain fell, one number per seed of the best rate."""
        return [mean_loss(origin(one, self.base), self.domain) - mean_loss(one.end, self.domain) for one in self.best]

    @property
    def forgotten(self) -> Spread | None:
        """Nats per token by which the mean loss of the retention texts rose, counted from `origin`; None without these texts."""
        if not self.retention:
            return None
        return spread([path(one, self.base, self.domain, self.retention)[-1][1] for one in self.best])

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
        return spread([result.end.tokens for result in self.best]).mean

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

    def metric(self, task: str, before: bool = False) -> Spread | None:
        """Return the preferred metric of a task at the best rate, over seeds; None if the result of any seed lacks the metric."""
        metrics = [metric_of((result.tasks_before if before else result.tasks).get(task, {})) for result in self.best]
        numbers = [number for number in metrics if number is not None]
        return spread(numbers) if len(numbers) == len(metrics) else None


@dataclasses.dataclass(frozen=True)
class AtEqualLearning:
    """Nats that a variant had forgotten, by seed, when it had learned `Findings.common_learning`.

    `rate` names the rate at which the variant had forgotten least.
    """

    variant: str
    rate: str
    by_seed: Mapping[int, float]

    @property
    def forgotten(self) -> Spread:
        """Mean and spread of `by_seed`."""
        return spread(list(self.by_seed.values()))


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
    def common_learning(self) -> float:
        """Nats per token that at least half of the variants learned at their best rates with every seed; at least 0.

        The minimum over all variants would not do: the slowest may have learned next to nothing, where nothing is forgotten yet.
        """
        learned = sorted(min(variant.learned_by_seed) for variant in self.variants.values())
        return max(0.0, learned[(len(learned) - 1) // 2])

    @property
    def compares_forgetting(self) -> bool:
        """True if there are retention texts and half of the variants have learned something, so that forgetting can be compared."""
        return bool(self.variants and self.retention) and self.common_learning > 0

    def at_equal_learning(self) -> list[AtEqualLearning]:
        """Return what each variant had forgotten when it had learned `common_learning`, the least first.

        A variant appears at the rate at which it had forgotten least, by the mean over the seeds that its rates share, or over all
        seeds of a rate if the rates share none. A rate counts only if it has as many seeds as the best rate and every seed learned
        that much. A variant without a rate that counts is left out.
        """
        entries = []
        for variant in self.variants.values():
            reached = []
            for rate, results in by_rate(variant.results).items():
                forgotten = {
                    result.seed: forgotten_at(
                        self.common_learning, path(result, self.base, self.domain, self.retention)
                    )
                    for result in results
                }
                by_seed = {seed: number for seed, number in forgotten.items() if number is not None}
                if len(by_seed) == len(results) == len(variant.best):
                    reached.append(AtEqualLearning(variant.name, rate, by_seed))
            if reached:
                common = set.intersection(*(set(one.by_seed) for one in reached))
                entries.append(min(reached, key=partial(_mean_forgotten, seeds=common)))
        return sorted(entries, key=lambda one: one.forgotten.mean)

    def verdicts(self, variant: str) -> list[Verdict]:
        """Return a verdict on a variant and each of its trained null controls.

        Null controls that share no seed with the variant are left out.
        """
        own = self.variants[variant].ends
        compared = (
            verdict(control, own, {result.seed: mean_loss(result.end, self.domain) for result in results})
            for control, results in self.controls.get(variant, {}).items()
        )
        return [one for one in compared if one is not None]

    def controls_of(self, variant: str) -> list[Verdict]:
        """Return the verdicts on all null controls of a variant: first the trained ones, then shuffled addresses."""
        shuffled = self.loss_when_shuffled(variant)
        return [*self.verdicts(variant), *([] if shuffled is None else [shuffled])]

    def loss_when_shuffled(self, variant: str) -> Verdict | None:
        """Return a verdict on how many nats the loss of the domain rises when the values of the trained variant are permuted."""
        rises = []
        for result in self.variants[variant].best:
            if result.shuffled is not None:
                assert result.saved is not None, "measured before"
                rises.append(spread([result.shuffled[name] - result.saved[name] for name in self.domain]).mean)
        if not rises:
            return None
        rise = spread(rises)
        conclusion = in_words(
            rise, "its addresses matter", "its addresses do not matter", "its addresses are not shown to matter"
        )
        return Verdict(SHUFFLED, rise, conclusion)


def _mean_forgotten(one: AtEqualLearning, seeds: Set[int]) -> float:
    """Return the mean forgetting over `seeds`, or over all seeds of the entry if `seeds` is empty."""
    return spread([one.by_seed[seed] for seed in seeds or one.by_seed]).mean


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
