"""What was learned and what was forgotten: of one run, of several seeds, and where runs have learned equally much."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from midus_workbench.rates import Rate, rate_name
from midus_workbench.results import Point, Result


def mean_loss(point: Point, texts: Sequence[str]) -> float:
    """The mean of the losses of some texts, in nats per token; each text counts alike.

    Args:
        point: Of a curve.
        texts: Their names.
    """
    return statistics.fmean(point.losses[name] for name in texts)


def change(result: Result, texts: Sequence[str]) -> float:
    """What the mean loss of some texts rose by from the start of a run to its end: above 0 is forgotten, below 0 learned.

    Args:
        result: Of a run.
        texts: Their names.
    """
    return mean_loss(result.end, texts) - mean_loss(result.start, texts)


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
    """The rate at which the mean loss of the domain over seeds ends lowest, the first of several.

    Args:
        results: Of one arm, one or more.
        domain: Names of texts.
    """
    groups = by_rate(results)
    most = max(map(len, groups.values()))  # a rate at which some seed failed is not compared with whole ones
    whole = {name: group for name, group in groups.items() if len(group) == most}
    best = min(whole, key=lambda name: statistics.fmean(mean_loss(result.end, domain) for result in whole[name]))
    return whole[best][0].rate


def change_at(result: Result, learned: float, domain: Sequence[str], retention: Sequence[str]) -> float | None:
    """What the loss of retention texts had risen by when a run had learned so much, between measurements on a straight line.

    Args:
        result: Of a run.
        learned: Nats by which the loss of the domain had fallen from its start.
        domain: Names of texts.
        retention: Names of texts.

    Returns:
        None if the run never learned so much.
    """
    start, kept = mean_loss(result.start, domain), mean_loss(result.start, retention)
    before = (0.0, 0.0)
    for point in result.curve[1:]:
        here = (start - mean_loss(point, domain), mean_loss(point, retention) - kept)
        if here[0] >= learned:
            share = 1.0 if here[0] == before[0] else (learned - before[0]) / (here[0] - before[0])
            return before[1] + max(share, 0.0) * (here[1] - before[1])
        before = here
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
    seeds = sorted(set(arm) & set(null))
    if not seeds:
        return None
    advantage = spread([null[seed] - arm[seed] for seed in seeds])
    if advantage.mean <= 0:
        words = "does not beat it"
    elif advantage.half_interval is None:
        words = "one seed"
    else:
        words = "beats it" if advantage.mean > advantage.half_interval else "not shown to beat it"
    return Verdict(control, advantage, words)
