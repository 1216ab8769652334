"""Findings as PNG pictures. Every function here needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from midus_hf.compare.learning import by_rate, falls, mean_loss, spread
from midus_hf.compare.report.findings import Findings, VariantFindings
from midus_hf.look.pictures import as_png, new_figure

_SIZE = (9.0, 5.5)
_Moment = TypeVar("_Moment")


def pictures(findings: Findings) -> dict[str, bytes]:
    """Draw all pictures of a comparison, and return them as PNG by title."""
    drawn = {}
    if findings.domain and findings.retention:
        drawn["Learning against forgetting"] = draw_frontier(findings)
    if findings.domain:
        drawn["Loss of the domain by tokens"] = draw_curves(findings, findings.domain)
    if findings.retention:
        drawn["Loss outside the domain by tokens"] = draw_curves(findings, findings.retention)
    return drawn


def draw_frontier(findings: Findings) -> bytes:
    """Draw learning against forgetting: a path per variant and rate, with error bars of one standard deviation over seeds at its end.

    The best rate of a variant is opaque, its other rates are faint. If some variants do not start at the base, the picture is
    cropped to the whole paths of the other variants and to the ends of all paths. The picture is returned as PNG.
    """
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    inside = [(0.0, 0.0)]
    for color, variant in _colored(findings.variants):
        for rate, results in by_rate(variant.results).items():
            is_best = rate == variant.rate
            learned = _beside([falls(result, findings.base, findings.domain) for result in results])
            remembered = _beside([falls(result, findings.base, findings.retention) for result in results])
            xs = [spread(moment) for moment in learned]
            ys = [spread([-fall for fall in moment]) for moment in remembered]
            points = [(x.mean, y.mean) for x, y in zip(xs, ys, strict=True)]
            wide, high = xs[-1].deviation or 0.0, ys[-1].deviation or 0.0
            inside += [(points[-1][0] + sign * wide, points[-1][1] + sign * high) for sign in (-1, 1)]
            inside += [] if variant.starts_elsewhere else points
            look: dict[str, Any] = {"color": color, "alpha": 1.0 if is_best else 0.3}
            axes.plot(*zip(*points, strict=True), **look, label=variant.name if is_best else None)
            axes.errorbar(
                xs[-1].mean, ys[-1].mean, xerr=xs[-1].deviation, yerr=ys[-1].deviation, fmt="o", capsize=3, **look
            )
    if any(variant.starts_elsewhere for variant in findings.variants.values()):
        for set_limits, numbers in zip((axes.set_xlim, axes.set_ylim), zip(*inside, strict=True), strict=True):
            margin = 0.1 * (max(numbers) - min(numbers)) or 0.1
            set_limits(min(numbers) - margin, max(numbers) + margin)
    axes.axhline(0.0, color="#888888", linewidth=0.8)
    axes.set_xlabel("learned: nats per token by which the loss of the domain fell")
    axes.set_ylabel("forgotten: nats by which\nthe loss outside it rose")
    return _png(figure, axes)


def draw_curves(findings: Findings, texts: Sequence[str]) -> bytes:
    """Draw the mean loss of some texts against tokens, each variant at its best rate, and return PNG.

    Lines are means over seeds; bands reach from the lowest to the highest loss of any seed.
    """
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    for color, variant in _colored(findings.variants):
        columns = _beside([result.curve for result in variant.best])
        tokens = [spread([point.tokens for point in column]).mean for column in columns]
        losses = [[mean_loss(point, texts) for point in column] for column in columns]
        axes.plot(
            tokens, [spread(numbers).mean for numbers in losses], color=color, label=f"{variant.name} ({variant.rate})"
        )
        axes.fill_between(tokens, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("nats per token")
    return _png(figure, axes)


def _beside(runs: Sequence[Sequence[_Moment]]) -> list[list[_Moment]]:
    """Return the moments of several runs side by side: first the moments that all runs have before their ends, then the ends."""
    common = min(map(len, runs)) - 1
    return [*(list(moment) for moment in zip(*(run[:common] for run in runs), strict=True)), [run[-1] for run in runs]]


def _colored(variants: Mapping[str, VariantFindings]) -> list[tuple[Any, VariantFindings]]:
    """Return each variant with a color; colors repeat after 20 variants."""
    import matplotlib

    colors = matplotlib.colormaps["tab20" if len(variants) > 10 else "tab10"]
    return [(colors(number % colors.N), variant) for number, variant in enumerate(variants.values())]


def _png(figure: Any, axes: Any) -> bytes:
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure, tight=False)
