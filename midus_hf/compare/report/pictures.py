"""Findings as pictures, PNG. All of them need matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from midus_hf.analysis.pictures import as_png, new_figure
from midus_hf.compare.learning import mean_loss, path, spread
from midus_hf.compare.report.findings import ArmFindings, Findings
from midus_hf.compare.results import Result

_SIZE = (9.0, 5.5)
_Moment = TypeVar("_Moment")


def pictures(found: Findings) -> dict[str, bytes]:
    """All pictures, by what they show.

    Args:
        found: Of a comparison with one arm or more.
    """
    drawn = {"Loss of the domain by tokens": draw_curves(found, found.domain)}
    if found.retention:
        drawn = {"Learning against forgetting": draw_frontier(found), **drawn}
        drawn["Loss outside the domain by tokens"] = draw_curves(found, found.retention)
    return {**drawn, "Parameters, memory and time": draw_costs(found)}


def draw_frontier(found: Findings) -> bytes:
    """Learning against forgetting: a path for each arm and rate, with bars of one standard deviation over seeds at its end.

    The best rate of an arm is drawn full, the others faint. Of arms that do not start at the base the end is in the picture.

    Args:
        found: Of a comparison with retention texts.
    """
    figure, axes = _figure()
    inside = [(0.0, 0.0)]
    for color, arm in _colored(found.arms):
        for rate in dict.fromkeys(_rate(result) for result in arm.results):
            results = [result for result in arm.results if _rate(result) == rate]
            is_best = results[0] in arm.best
            paths = [path(result, found.base, found.domain, found.retention) for result in results]
            moments = _beside(paths)
            xs = [spread([x for x, _ in moment]) for moment in moments]
            ys = [spread([y for _, y in moment]) for moment in moments]
            points = [(x.mean, y.mean) for x, y in zip(xs, ys, strict=True)]
            wide, high = xs[-1].deviation or 0.0, ys[-1].deviation or 0.0
            inside += [(points[-1][0] + sign * wide, points[-1][1] + sign * high) for sign in (-1, 1)]
            inside += [] if arm.starts_elsewhere else points
            look: dict[str, Any] = {"color": color, "alpha": 1.0 if is_best else 0.3}
            axes.plot(*zip(*points, strict=True), **look, label=arm.name if is_best else None)
            axes.errorbar(
                xs[-1].mean, ys[-1].mean, xerr=xs[-1].deviation, yerr=ys[-1].deviation, fmt="o", capsize=3, **look
            )
    if any(arm.starts_elsewhere for arm in found.arms.values()):
        for set_limits, numbers in zip((axes.set_xlim, axes.set_ylim), zip(*inside, strict=True), strict=True):
            margin = 0.1 * (max(numbers) - min(numbers)) or 0.1
            set_limits(min(numbers) - margin, max(numbers) + margin)
    axes.axhline(0.0, color="#888888", linewidth=0.8)
    axes.set_xlabel("learned: nats per token by which the loss of the domain fell")
    axes.set_ylabel("forgotten: nats by which\nthe loss outside it rose")
    return _png(figure, axes)


def draw_curves(found: Findings, texts: Sequence[str]) -> bytes:
    """The mean loss of some texts against tokens, each arm at its best rate; the band reaches from the least to the greatest seed.

    Args:
        found: Of a comparison.
        texts: Their names.
    """
    figure, axes = _figure()
    for color, arm in _colored(found.arms):
        columns = _beside([result.curve for result in arm.best])
        tokens = [spread([point.tokens for point in column]).mean for column in columns]
        losses = [[mean_loss(point, texts) for point in column] for column in columns]
        axes.plot(tokens, [spread(numbers).mean for numbers in losses], color=color, label=f"{arm.name} ({arm.rate})")
        axes.fill_between(tokens, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("nats per token")
    return _png(figure, axes)


def draw_costs(found: Findings) -> bytes:
    """What each arm costs: parameters that train, memory of training, and its seconds.

    Args:
        found: Of a comparison.
    """
    figure = new_figure(_SIZE[0], 1.2 + 0.3 * len(found.arms))
    names = list(found.arms)[::-1]
    columns = {
        "parameters that train, millions": [found.arms[name].best[0].trained_parameters / 1e6 for name in names],
        "memory of training, GB": [
            max(one.peak_memory_bytes for one in found.arms[name].best) / 1e9 for name in names
        ],
        "seconds of training": [spread([one.seconds for one in found.arms[name].best]).mean for name in names],
    }
    all_axes = figure.subplots(1, len(columns), sharey=True)
    for axes, (title, numbers) in zip(all_axes, columns.items(), strict=True):
        axes.barh(names, numbers, color="#4c72b0")
        axes.set_title(title, fontsize=9)
    return as_png(figure, tight=False)


def _beside(runs: Sequence[Sequence[_Moment]]) -> list[list[_Moment]]:
    """What several runs have at each moment that all of them have, and at their ends, which may not be at the same step."""
    common = min(map(len, runs)) - 1
    return [*(list(moment) for moment in zip(*(run[:common] for run in runs), strict=True)), [run[-1] for run in runs]]


def _rate(result: Result) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(result.rate.items()))


def _colored(arms: Mapping[str, ArmFindings]) -> list[tuple[Any, ArmFindings]]:
    import matplotlib

    colors = matplotlib.colormaps["tab20" if len(arms) > 10 else "tab10"]
    return [(colors(number % colors.N), arm) for number, arm in enumerate(arms.values())]


def _figure() -> tuple[Any, Any]:
    figure = new_figure(*_SIZE)
    return figure, figure.subplots()


def _png(figure: Any, axes: Any) -> bytes:
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure, tight=False)
