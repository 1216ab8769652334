"""What was learned and what was forgotten: of one run, of several seeds, and where runs have learned equally much."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from midus_hf.compare.rates import Rate, rate_name
from midus_hf.compare.results import Point, Result


def mean_loss(point: Point, texts: Sequence[str]) -> float:
    """The mean of the losses of some texts, in nats per token; each text counts alike.

    Args:
        point: Of a curve.
        texts: Their names.
    """
    return statistics.fmean(point.losses[name] for name in texts)


def origin(result: Result, base: Result) -> Point:
    """What the losses of a run are held against: its own start, or the base where it does not start there.

    An upscaled model that does not compute what its base computes has lost something before training; to make up for that is no
    learning. Where a run does start at the base, its own start counts: it was measured in the precision of training, as its end was.

    Args:
        result: Of a run.
        base: What was measured of the base.
    """
    return base.end if result.new_parameters and not result.starts_at_base else result.start


def path(result: Result, base: Result, domain: Sequence[str], retention: Sequence[str]) -> list[tuple[float, float]]:
    """Nats that a run had learned and forgotten at each moment of its curve: how far its losses lay below and above their origin.

    Args:
        result: Of a run.
        base: What was measured of the base.
        domain: Names of texts.
        retention: Names of texts.
    """
    zero = origin(result, base)
    loss, kept = mean_loss(zero, domain), mean_loss(zero, retention)
    return [(loss - mean_loss(point, domain), mean_loss(point, retention) - kept) for point in result.curve]


def by_rate(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by the name of their rate, in the order of rates.

    Args:
        results: Of one arm.
    """
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(rate_name(result.rate), []).append(result)
    return found


def best_rate(results: Sequence[Result], domain: Sequence[str]) -> Rate:
    """The rate at which the mean loss of the domain ends lowest, the first of several, over seeds that rates have in common.

    Args:
        results: Of one arm, one or more.
        domain: Names of texts.
    """
    rates, seeds = compared(results)

    def loss(name: str) -> float:
        counted = [result for result in rates[name] if result.seed in seeds or not seeds]
        return statistics.fmean(mean_loss(result.end, domain) for result in counted)

    return rates[min(rates, key=loss)][0].rate


def compared(results: Sequence[Result]) -> tuple[dict[str, list[Result]], set[int]]:
    """The rates of an arm that its best is chosen among, those with the most seeds, and the seeds that all of them have.

    A rate at which some seed failed is not compared with whole ones. Rates may have no seed in common: then each counts by its own.

    Args:
        results: Of one arm, one or more.
    """
    groups = by_rate(results)
    most = max(map(len, groups.values()))
    whole = {name: group for name, group in groups.items() if len(group) == most}
    return whole, set.intersection(*({result.seed for result in group} for group in whole.values()))


def forgotten_at(learned: float, moments: Sequence[tuple[float, float]]) -> float | None:
    """What a run had forgotten when it had first learned so much, between measurements on a straight line.

    Args:
        learned: Nats, above 0.
        moments: From `path`.

    Returns:
        None if the run never learned so much: nothing is told of what was not reached.
    """
    for before, here in itertools.pairwise(moments):
        if before[0] < learned <= here[0]:
            share = (learned - before[0]) / (here[0] - before[0])
            return before[1] + share * (here[1] - before[1])
    return None


@dataclasses.dataclass(frozen=True)
class Spread:
    """Numbers of several seeds.

    Args:
        mean: Theirs.
        deviation: Their sample standard deviation; None of one number.
        count: How many there are.
    """

    mean: float
    deviation: float | None
    count: int

    @property
    def half_interval(self) -> float | None:
        """Half of the 95 % confidence interval of the mean, by Student's t; None of one number."""
        if self.deviation is None:
            return None
        return student_quantile(self.count - 1) * self.deviation / math.sqrt(self.count)

    @property
    def is_above_zero(self) -> bool:
        """Whether the 95 % confidence interval of the mean lies above 0; one number has none."""
        return self.half_interval is not None and self.mean > self.half_interval


def spread(numbers: Sequence[float]) -> Spread:
    """The mean and the spread of numbers, one or more.

    Args:
        numbers: One of each seed.
    """
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(statistics.fmean(numbers), deviation, len(numbers))


def student_quantile(degrees: int, probability: float = 0.975) -> float:
    """The quantile of Student's t distribution, by bisection of its distribution function (Abramowitz and Stegun, 26.7.3 and 4).

    Args:
        degrees: Of freedom, 1 or more.
        probability: Above 0.5. Default: 0.975, the end of a two-sided interval of 95 %.
    """
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, degrees) < probability else (low, middle)
    return high


def _student(t: float, degrees: int) -> float:
    """The probability that a variable of Student's distribution is at most `t`, which is 0 or above."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for number in range(3, degrees - 1, 2):
            term *= cosine**2 * (number - 1) / number
            total += term
        return 0.5 + (angle + sine * total) / math.pi
    term = total = 1.0
    for number in range(2, degrees - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    return 0.5 + sine * total / 2


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether an arm learned more than one of its null controls.

    Args:
        control: Which.
        advantage: Nats by which the arm's loss of the domain ended lower than the control's, of the same seed each.
        words: What follows from that: `beats it`, `does not beat it`, `not shown to beat it` or `one seed`.
    """

    control: str
    advantage: Spread
    words: str


def paired(lower: Mapping[int, float], higher: Mapping[int, float]) -> Spread | None:
    """The differences of numbers of the same seed each.

    Args:
        lower: By seed; what is subtracted.
        higher: By seed.

    Returns:
        None if they have no seed in common.
    """
    seeds = sorted(set(lower) & set(higher))
    return spread([higher[seed] - lower[seed] for seed in seeds]) if seeds else None


def verdict(control: str, arm: Mapping[int, float], null: Mapping[int, float]) -> Verdict | None:
    """Compare an arm with a control, seed by seed.

    It beats the control where the 95 % interval of the mean advantage lies above 0, and does not where the mean is 0 or below.

    Args:
        control: Its name.
        arm: Loss of the domain at the end, by seed.
        null: The control's.

    Returns:
        None if they have no seed in common.
    """
    advantage = paired(arm, null)
    if advantage is None:
        return None
    words = in_words(advantage, "beats it", "does not beat it", "not shown to beat it")
    return Verdict(control, advantage, words)


def in_words(difference: Spread, above: str, not_above: str, unclear: str) -> str:
    """What may be said of a difference of several seeds; of a single one above 0 that it is one.

    Args:
        difference: Of numbers of the same seed each.
        above: Where its 95 % interval lies above 0.
        not_above: Where its mean is 0 or below.
        unclear: Where the interval reaches 0.
    """
    if difference.mean <= 0:
        return not_above
    if difference.count == 1:
        return "one seed"
    return above if difference.is_above_zero else unclear
