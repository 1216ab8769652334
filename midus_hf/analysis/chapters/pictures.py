"""Pictures of which texts read which chapters and what chapters do, as matplotlib figures. All functions need matplotlib."""

import math
from collections.abc import Sequence
from typing import Any

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.chapters.tables import where
from midus_hf.analysis.pictures import HEAT, label_some, new_figure


def draw_shares(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of the share of each text's tokens that read each routed chapter: a panel per text, a row per layer.

    Args:
        stats: Statistics of one memory, per layer.
    """
    maps = {
        text: [of_layer.texts[text].read_shares[of_layer.shared_chapters :] for of_layer in stats]
        for text in stats[0].texts
    }
    most = max(max(map(max, of_text)) for of_text in maps.values())
    return _panels(
        {f"{text}: share of tokens that read a chapter": of_text for text, of_text in maps.items()},
        stats,
        {"cmap": "viridis", "vmin": 0, "vmax": most or 1},
    )


def draw_specialisation(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of log2 of each routed chapter's lift (`ChapterStats.lifts`): a panel per text, a row per layer.

    Args:
        stats: Statistics of one memory, per layer, with lifts.
    """
    most = max(1.0, math.log2(len(stats[0].lifts)))
    maps = {
        f"{text}: log2 of the lift of a chapter": [
            [math.nan if lift is None else math.log2(max(lift, 2**-most)) for lift in of_layer.lifts[text]]
            for of_layer in stats
        ]  # NaN stays blank in the picture
        for text in stats[0].lifts
    }
    return _panels(maps, stats, {"cmap": "RdBu_r", "vmin": -most, "vmax": most})


def draw_entropies(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of the entropy of each layer's router on each text, with a line at the greatest possible entropy.

    Args:
        stats: Statistics of one memory, per layer.
    """
    texts = list(stats[0].texts)
    figure = new_figure(max(6.0, 0.35 * len(stats) * len(texts)), 3.6, layout=None)
    axes = figure.subplots()
    width = 0.8 / len(texts)
    for number, text in enumerate(texts):
        places = [layer - 0.4 + width * (number + 0.5) for layer in range(len(stats))]
        axes.bar(places, [of_layer.texts[text].entropy or 0.0 for of_layer in stats], width, label=text)
    axes.axhline(stats[0].greatest_entropy, color="#888888", linewidth=1, linestyle="--", label="all alike")
    axes.set_xticks(range(len(stats)), [str(of_layer.layer) for of_layer in stats])
    axes.set_xlabel("layer")
    axes.set_ylabel("entropy of the router (nats)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(texts), loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def draw_ablation(ablation: Ablation) -> Any:
    """Return a figure of how much each text's loss grows without each chapter, in 1/1000 nat per token: a row per text.

    Args:
        ablation: Result for at least one chapter.
    """
    texts = list(ablation.losses)
    effects = [[1000 * row.effects[text].difference for row in ablation.chapters] for text in texts]
    most = max(max(map(abs, of_text)) for of_text in effects) or 1.0
    width = min(24.0, max(6.0, 2.5 + 0.3 * len(ablation.chapters)))
    figure = new_figure(width, 1.4 + 0.4 * len(texts), layout=None)
    axes = figure.subplots()
    image = axes.imshow(effects, cmap="RdBu_r", vmin=-most, vmax=most, **HEAT)
    label_some(axes.set_xticks, [str(row.chapter) for row in ablation.chapters], 64)
    axes.set_yticks(range(len(texts)), texts)
    axes.set_xlabel("chapter")
    figure.colorbar(image, ax=axes, label="loss gained\n(1/1000 nat per token)")
    return figure


def _panels(maps: dict[str, list[list[float]]], stats: Sequence[ChapterStats], colours: dict[str, Any]) -> Any:
    """Return a figure of heat maps `[layers, C - S]`, given by title, one below another with the same colour scale."""
    shared, layers = stats[0].shared_chapters, len(stats)
    figure = new_figure(9, len(maps) * (1.1 + 0.16 * layers) + 0.4)
    panels = figure.subplots(len(maps), squeeze=False)[:, 0]
    image: Any = None
    for axes, (title, rows) in zip(panels, maps.items(), strict=True):
        extent = (shared - 0.5, shared + len(rows[0]) - 0.5, layers - 0.5, -0.5)
        image = axes.imshow(rows, extent=extent, **colours, **HEAT)
        axes.set_title(title, fontsize="medium", loc="left")
        label_some(axes.set_yticks, [where(of_layer, stats) for of_layer in stats])
        axes.set_ylabel("layer")
    panels[-1].set_xlabel("chapter")
    figure.colorbar(image, ax=list(panels))
    return figure
