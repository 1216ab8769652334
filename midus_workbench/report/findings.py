"""The results of a comparison in the order that a person asks for them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from midus_workbench.learning import (
    Spread,
    Verdict,
    best_rate,
    by_rate,
    change,
    change_at,
    mean_loss,
    spread,
    verdict,
)
from midus_workbench.options import Comparison
from midus_workbench.rates import rate_name
from midus_workbench.results import Result

_METRICS = ("acc_norm", "acc", "exact_match")
"""Of a task, the first of these that it has is told."""


@dataclasses.dataclass(frozen=True)
class ArmFindings:
    """What is known of one arm.

    Args:
        name: Of the arm.
        results: Of all rates and seeds.
        rate: Name of the rate at which the domain was learned best.
        domain: Names of texts.
        retention: Names of texts.
    """

    name: str
    results: Sequence[Result]
    rate: str
    domain: Sequence[str]
    retention: Sequence[str]

    @property
    def best(self) -> Sequence[Result]:
        """Of the best rate, a result of each seed."""
        return by_rate(self.results)[self.rate]

    @property
    def domain_loss(self) -> Spread:
        """Mean loss of the domain at the end."""
        return spread([mean_loss(result.end, self.domain) for result in self.best])

    @property
    def learned(self) -> Spread:
        """Nats by which the loss of the domain fell from the model's own start."""
        return spread([-change(result, self.domain) for result in self.best])

    @property
    def forgotten(self) -> Spread | None:
        """Nats by which the loss of retention texts rose from the model's own start; None without such texts."""
        return spread([change(result, self.retention) for result in self.best]) if self.retention else None

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
    """What an arm had forgotten when it had learned as much as every arm did.

    Args:
        arm: Its name.
        rate: The rate at which that was least.
        forgotten: By seed.
    """

    arm: str
    rate: str
    forgotten: Spread


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
        learned = sorted(min(-change(result, self.domain) for result in arm.best) for arm in self.arms.values())
        return max(0.0, learned[(len(learned) - 1) // 2])

    @property
    def compares_forgetting(self) -> bool:
        """Whether there is a learning that half of the arms have reached, and text outside the domain to tell what that cost."""
        return bool(self.arms and self.retention) and self.common_learning > 0

    def at_equal_learning(self) -> list[AtEqualLearning]:
        """What each arm that learned so much had forgotten at the common learning, the least first.

        Of its rates the one counts at which that was least; those at which a seed does not get there are left out.
        """
        found = []
        for arm in self.arms.values():
            reached = []
            for rate, results in by_rate(arm.results).items():
                changes = [change_at(result, self.common_learning, self.domain, self.retention) for result in results]
                if len(results) == len(arm.best) and None not in changes:
                    reached.append(
                        AtEqualLearning(arm.name, rate, spread([one for one in changes if one is not None]))
                    )
            found += [min(reached, key=lambda one: one.forgotten.mean)] if reached else []
        return sorted(found, key=lambda one: one.forgotten.mean)

    def verdicts(self, arm: str) -> list[Verdict]:
        """Of an arm and each of its trained null controls.

        Args:
            arm: Its name.
        """
        own = self._ends(self.arms[arm].best)
        compared = (
            verdict(control, own, self._ends(results)) for control, results in self.controls.get(arm, {}).items()
        )
        return [one for one in compared if one is not None]

    def loss_when_shuffled(self, arm: str) -> Spread | None:
        """Nats by which the loss of the domain rises when the trained arm's values are permuted; None if that was not measured.

        Args:
            arm: Its name.
        """
        rises = [
            sum(result.shuffled[name] - result.end.losses[name] for name in self.domain) / len(self.domain)
            for result in self.arms[arm].best
            if result.shuffled is not None
        ]
        return spread(rises) if rises else None

    def _ends(self, results: Iterable[Result]) -> dict[int, float]:
        return {result.seed: mean_loss(result.end, self.domain) for result in results}


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
            arms[name] = ArmFindings(name, own, rate, domain, retention)
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
