"""The results of a comparison in the order that a person asks for them."""

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
from midus_hf.compare.nulls import SHUFFLED
from midus_hf.compare.options import Comparison
from midus_hf.compare.rates import Rate, rate_name
from midus_hf.compare.results import Result

_METRICS = ("acc_norm", "acc", "exact_match")
"""Of a task, the first of these that it has is told."""


@dataclasses.dataclass(frozen=True)
class ArmFindings:
    """What is known of one arm.

    Args:
        name: Of the arm.
        base: What was measured of the base.
        results: Of all rates and seeds.
        rate: Name of the rate at which the domain was learned best.
        domain: Names of texts.
        retention: Names of texts.
    """

    name: str
    base: Result
    results: Sequence[Result]
    rate: str
    domain: Sequence[str]
    retention: Sequence[str]

    @property
    def best(self) -> Sequence[Result]:
        """Of the best rate, a result of each seed."""
        return by_rate(self.results)[self.rate]

    @property
    def ends(self) -> Mapping[int, float]:
        """Mean loss of the domain at the end, by seed."""
        return {result.seed: mean_loss(result.end, self.domain) for result in self.best}

    @property
    def domain_loss(self) -> Spread:
        """The same over seeds."""
        return spread(list(self.ends.values()))

    @property
    def learned(self) -> Spread:
        """Nats by which the loss of the domain fell from its origin."""
        return spread(self.learned_by_seed)

    @property
    def learned_by_seed(self) -> list[float]:
        """The same, a number of each seed."""
        return [mean_loss(origin(one, self.base), self.domain) - mean_loss(one.end, self.domain) for one in self.best]

    @property
    def forgotten(self) -> Spread | None:
        """Nats by which the loss of retention texts rose from its origin; None without such texts."""
        if not self.retention:
            return None
        return spread([path(one, self.base, self.domain, self.retention)[-1][1] for one in self.best])

    @property
    def starts_elsewhere(self) -> bool:
        """Whether a model that training began with did not compute what the base computes, or nobody looked."""
        return any(origin(result, self.base) is self.base.end for result in self.best)

    @property
    def is_causal(self) -> bool:
        """Whether its losses are of tokens that were predicted from those in front of them alone."""
        return all(result.is_causal for result in self.best)

    @property
    def tokens(self) -> float:
        """Tokens trained on, the mean over seeds."""
        return spread([result.end.tokens for result in self.best]).mean

    @property
    def rates(self) -> list[Rate]:
        """Those it was trained at, in their order."""
        return [results[0].rate for results in by_rate(self.results).values()]

    @property
    def is_at_an_end_of_its_rates(self) -> bool:
        """Whether a number of the best rate is the least or the greatest of those that were tried."""
        tried = [[rate[key] for rate in self.rates if key in rate] for key in self.best[0].rate]
        best = list(self.best[0].rate.values())
        return any(
            len(set(numbers)) > 1 and number in (min(numbers), max(numbers))
            for number, numbers in zip(best, tried, strict=True)
        )

    def metric(self, task: str, before: bool = False) -> Spread | None:
        """The usual metric of a task, after training or before; None if a result lacks it.

        Args:
            task: Its name.
            before: Whether of the model that training began with. Default: false.
        """
        found = [metric_of((result.tasks_before if before else result.tasks).get(task, {})) for result in self.best]
        numbers = [number for number in found if number is not None]
        return spread(numbers) if len(numbers) == len(found) else None


@dataclasses.dataclass(frozen=True)
class AtEqualLearning:
    """What an arm had forgotten when it had learned as much as half of the arms did in the end.

    Args:
        arm: Its name.
        rate: The rate at which that was least.
        by_seed: Nats, by seed.
    """

    arm: str
    rate: str
    by_seed: Mapping[int, float]

    @property
    def forgotten(self) -> Spread:
        """The same over seeds."""
        return spread(list(self.by_seed.values()))


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that is told of a comparison.

    Args:
        comparison: What was asked for.
        base: What was measured of the base.
        arms: Those with results, by name, in the order of the comparison.
        controls: Results of null controls, by the name of their arm and of the control.
        failures: What failed, by its name, and why.
        missing: How many runs of arms are not done.
    """

    comparison: Comparison
    base: Result
    arms: Mapping[str, ArmFindings]
    controls: Mapping[str, Mapping[str, Sequence[Result]]]
    failures: Mapping[str, str]
    missing: int

    @property
    def domain(self) -> list[str]:
        """Names of the domain's texts."""
        return list(self.comparison.domain)

    @property
    def retention(self) -> list[str]:
        """Names of the retention texts."""
        return list(self.comparison.retention)

    @property
    def common_learning(self) -> float:
        """Nats that half of the arms learned at their best rates with every seed, or more: 0 at least.

        What the slowest arm learned may be next to nothing, and nothing has been forgotten there.
        """
        learned = sorted(min(arm.learned_by_seed) for arm in self.arms.values())
        return max(0.0, learned[(len(learned) - 1) // 2])

    @property
    def compares_forgetting(self) -> bool:
        """Whether there is a learning that half of the arms have reached, and text outside the domain to tell what that cost."""
        return bool(self.arms and self.retention) and self.common_learning > 0

    def at_equal_learning(self) -> list[AtEqualLearning]:
        """What each arm that learned so much had forgotten at the common learning, the least first.

        Of its rates the one counts at which that was least, over seeds that rates have in common if there are any; those at which a
        seed does not get there are left out.
        """
        found = []
        for arm in self.arms.values():
            reached = []
            for rate, results in by_rate(arm.results).items():
                forgotten = {
                    result.seed: forgotten_at(
                        self.common_learning, path(result, self.base, self.domain, self.retention)
                    )
                    for result in results
                }
                told = {seed: number for seed, number in forgotten.items() if number is not None}
                if len(told) == len(results) == len(arm.best):
                    reached.append(AtEqualLearning(arm.name, rate, told))
            if reached:
                common = set.intersection(*(set(one.by_seed) for one in reached))
                found.append(min(reached, key=partial(_mean_forgotten, seeds=common)))
        return sorted(found, key=lambda one: one.forgotten.mean)

    def verdicts(self, arm: str) -> list[Verdict]:
        """Of an arm and each of its trained null controls.

        Args:
            arm: Its name.
        """
        own = self.arms[arm].ends
        compared = (
            verdict(control, own, {result.seed: mean_loss(result.end, self.domain) for result in results})
            for control, results in self.controls.get(arm, {}).items()
        )
        return [one for one in compared if one is not None]

    def controls_of(self, arm: str) -> list[Verdict]:
        """What is known of all its null controls, the one that is only measured last.

        Args:
            arm: Its name.
        """
        shuffled = self.loss_when_shuffled(arm)
        return [*self.verdicts(arm), *([] if shuffled is None else [shuffled])]

    def loss_when_shuffled(self, arm: str) -> Verdict | None:
        """Nats by which the loss of the domain rises when the trained arm's values are permuted; None if that was not measured.

        Args:
            arm: Its name.
        """
        rises = []
        for result in self.arms[arm].best:
            if result.shuffled is not None:
                # Earlier results have it as the run measured it, in the precision of training, alone.
                before = result.end.losses if result.unshuffled is None else result.unshuffled
                rises.append(spread([result.shuffled[name] - before[name] for name in self.domain]).mean)
        if not rises:
            return None
        rise = spread(rises)
        words = in_words(
            rise, "its addresses matter", "its addresses do not matter", "its addresses are not shown to matter"
        )
        return Verdict(SHUFFLED, rise, words)


def _mean_forgotten(one: AtEqualLearning, seeds: Set[int]) -> float:
    """Over these seeds, or over its own where there are none."""
    return spread([one.by_seed[seed] for seed in seeds or one.by_seed]).mean


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Put results in order.

    Args:
        comparison: What was asked for.
        base: What was measured of the base.
        results: Of all cells that are done.
        failures: What failed, by its name, and why.
        missing: How many runs are not done. Default: 0.
    """
    domain, retention = list(comparison.domain), list(comparison.retention)
    arms = {}
    controls: dict[str, dict[str, list[Result]]] = {}
    for name in comparison.arms:
        own = [result for result in results if result.arm == name]
        if own:
            rate = rate_name(best_rate(own, domain))
            arms[name] = ArmFindings(name, base, own, rate, domain, retention)
    for result in results:
        if (
            result.control is not None
            and result.control_of in arms
            and rate_name(result.rate) == arms[result.control_of].rate
        ):
            controls.setdefault(result.control_of, {}).setdefault(result.control, []).append(result)
    return Findings(comparison, base, arms, controls, failures, missing)


def metric_of(metrics: Mapping[str, float]) -> float | None:
    """The metric of a task that is told, a number from 0 to 1; None if it has none that is known.

    Args:
        metrics: By name.
    """
    return next((metrics[name] for name in _METRICS if name in metrics), None)
