"""The usage of memory slots for people to look at: a table and a picture."""

from collections.abc import Mapping
from pathlib import Path

import torch
from rich.table import Table

from midus_hf.analysis.slots.block_usage import BankLevel
from midus_hf.analysis.slots.usage import MemoryUsage, Place
from midus_hf.analysis.watched_models import MemoryPlace

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def usage_table(memories: Mapping[MemoryPlace, MemoryUsage]) -> Table:
    """A row per memory.

    Args:
        memories: From `Usage.summary`.
    """
    table = Table(title="Slots retrieved")
    for name in ("layer", "used", "perplexity / N", "largest share"):
        table.add_column(name, justify="right")
    for place, usage in memories.items():
        table.add_row(str(place), f"{usage.used:.1%}", f"{usage.perplexity:.1%}", f"{usage.largest:.2%}")
    return table


def usage_curves(counts: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """How often the slots of each memory are retrieved, in multiples of the mean, most retrieved first.

    Args:
        counts: `[H, N]`, int64, by memory, or `[1, N]` by level of a bank.

    Returns:
        `[N]`, float64, by memory: sorted for each head, then the mean over heads, so 1 throughout where all slots are
        retrieved equally often; 0 throughout where none was.
    """
    curves = {}
    for place, of_memory in counts.items():
        wide = of_memory.double().cpu()
        mean = wide.mean(-1, keepdim=True).clamp(min=1 / wide.shape[-1])
        curves[place] = (wide / mean).sort(-1, descending=True).values.mean(0)
    return curves


def draw_usage(counts: Mapping[MemoryPlace | BankLevel, torch.Tensor], path: Path) -> None:
    """Draw a curve per memory, from dark for the first layer to light for the last, then one per level of a bank. Needs matplotlib.

    Args:
        counts: As in `usage_curves`.
        path: The file to write, of a kind in `PICTURE_SUFFIXES`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=120)
    axes = figure.subplots()
    curves = usage_curves(counts)
    colours = colormaps["viridis"]
    for number, (place, curve) in enumerate(curves.items()):
        rank = (torch.arange(len(curve)) + 1) / len(curve)
        colour = colours(0.9 * number / max(1, len(curves) - 1))
        axes.plot(rank.tolist(), curve.tolist(), color=colour, linewidth=1.5, label=_label(place))
    axes.axhline(1, color="#888888", linewidth=1, linestyle="--", label="all alike")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    kinds = {isinstance(place, BankLevel) for place in counts}
    read = (
        "slots of a head"
        if True not in kinds
        else "blocks of a level"
        if kinds == {True}
        else "slots, or blocks of a level"
    )
    axes.set_xlabel(f"{read}, most {'fetched' if kinds == {True} else 'retrieved'} first")
    axes.set_ylabel("times, in multiples of the mean" if True in kinds else "retrievals, in multiples of the mean")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(curves) // 8)
    figure.tight_layout()
    figure.savefig(path)


def _label(place: MemoryPlace | BankLevel) -> str:
    return str(place) if isinstance(place, BankLevel) else f"layer {place}"
