"""Learning and forgetting in nats, of one run and over several seeds."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from midus_hf.compare.options import Rate, rate_name
from midus_hf.compare.results import Result


def mean_loss(losses: Mapping[str, float], texts: Sequence[str]) -> float:
    """Return the mean loss of some texts, in nats per token; each text has the same weight."""
    return statistics.fmean(losses[name] for name in texts)


def origin(result: Result, base: Result) -> Mapping[str, float]:
    """Return the losses that learning and forgetting of a run are counted from: its own start, less what upscaling had changed.

    The start counts because it was measured by the Trainer, as the end was. Where the upscaled model was not seen to compute what the
    base computes, it has lost something before training, and to regain what it lost is not learning. What it lost is the
    difference between this model and the base by `midus eval`, which measures other sequences than the packed ones of the Trainer.
    """
    start, upscaled = result.start.losses, result.upscaled
    if upscaled is None:
        return start
    return {name: loss - (upscaled[name] - base.losses[name]) for name, loss in start.items()}


def falls(result: Result, base: Result, texts: Sequence[str]) -> list[float]:
    """Return how far the mean loss of some texts lies below that of `origin` at each point of a run's curve, in nats per token."""
    start = mean_loss(origin(result, base), texts)
    return [start - mean_loss(point.losses, texts) for point in result.curve]


def by_rate(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results of one variant grouped by the name of their rate, rates in the order of their first result."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(rate_name(result.rate), []).append(result)
    return groups


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
        return student_quantile(self.count - 1) * self.deviation / math.sqrt(self.count)

    @property
    def is_above_zero(self) -> bool:
        """True if the 95 % confidence interval of the mean lies above 0; false for a single number, which has no interval."""
        return self.half_interval is not None and self.mean > self.half_interval


def spread(numbers: Sequence[float]) -> Spread:
    """Return the mean and the spread of numbers, one per seed and at least one."""
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(statistics.fmean(numbers), deviation, len(numbers))


def differences(lower: Mapping[int, float], higher: Mapping[int, float]) -> list[float]:
    """Return `higher - lower` for each seed that both have, in the order of the seeds."""
    return [higher[seed] - lower[seed] for seed in sorted(set(lower) & set(higher))]


def paired(lower: Mapping[int, float], higher: Mapping[int, float]) -> Spread | None:
    """Return the spread of `higher - lower` over the seeds that both have; None if they share no seed."""
    numbers = differences(lower, higher)
    return spread(numbers) if numbers else None


def verdict(advantage: Spread) -> str:
    """Return in words whether a variant beats a null control, over whose loss it has this advantage.

    It does where the 95 % interval of the mean lies above 0, and does not where the mean is 0 or below.
    """
    if advantage.mean <= 0:
        return "does not beat it"
    if advantage.count == 1:
        return "one seed"
    return "beats it" if advantage.is_above_zero else "is not shown to beat it"


def student_quantile(degrees: int, probability: float = 0.975) -> float:
    """Return a quantile of Student's t distribution, by bisection (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, degrees) < probability else (low, middle)
    return high


def _student(t: float, degrees: int) -> float:
    """Return the probability that a variable of Student's distribution is at most `t`, where `t` is 0 or above."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term = total = cosine if is_odd else 1.0
    for number in range(2 + is_odd, degrees - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    if not is_odd:
        return 0.5 + sine * total / 2
    return 0.5 + (angle + sine * total * (degrees > 1)) / math.pi
