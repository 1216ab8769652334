"""Results about the importance of heads: tables, JSON, and pictures as in figure 4 of MIDUS."""

from collections.abc import Mapping
from typing import Any

from midus_hf.analysis.inside.head_importance import HeadImportance
from midus_hf.analysis.pictures import new_figure
from midus_hf.analysis.table_of_words import TableOfWords


def layers_table(name: str, importance: HeadImportance, absolute: bool) -> TableOfWords:
    """Return a table with a row per layer: mean and variance over its heads, and the head that matters most.

    Args:
        name: Name of the model.
        importance: Importance of the model's heads.
        absolute: Whether to show `HeadImportance.absolute` instead of `signed`.
    """
    scores, variances = _form(importance, absolute), importance.variances(absolute)
    rows = []
    for row, layer in enumerate(importance.layers):
        best = int(scores[row].argmax())
        cells = [f"{scores[row].mean():.4g}", f"{variances[row]:.4g}", str(best), f"{scores[row, best]:.4g}"]
        rows.append([str(layer), str(importance.base_layers[row]), *cells])
    title = f"{name}: {importance.answers:,} answers, {importance.loss:.3f} nats each"
    return TableOfWords(title, ["layer", "of the base", "mean", "variance", "head", "its importance"], rows)


def as_json(importances: Mapping[str, HeadImportance]) -> list[dict[str, Any]]:
    """Return all numbers, for other programs.

    Args:
        importances: Importance of each model's heads, by the model's name.
    """
    return [
        {
            "model": name,
            "answers": one.answers,
            "loss": one.loss,
            "layers": one.layers,
            "base_layers": one.base_layers,
            "signed": one.signed.tolist(),
            "absolute": one.absolute.tolist(),
            "variance_signed": one.variances(False).tolist(),
            "variance_absolute": one.variances(True).tolist(),
        }
        for name, one in importances.items()
    ]


def draw_heads(importances: Mapping[str, HeadImportance], absolute: bool) -> Any:
    """Return a figure with a map of heads by layers per model, on one scale, and the variances of layers. Needs matplotlib.

    Layers are numbered as in the base, so that models can be compared side by side.

    Args:
        importances: Importance of each model's heads, by the model's name; one model or more.
        absolute: Whether to draw `HeadImportance.absolute` instead of `signed`.
    """
    maps = {name: _form(one, absolute) for name, one in importances.items()}
    low = min(float(scores.min()) for scores in maps.values())
    high = max(float(scores.max()) for scores in maps.values())
    tallest = max(len(one.layers) for one in importances.values())
    figure = new_figure(4.2 * (len(maps) + 1), 1.5 + 0.2 * tallest)
    all_axes = figure.subplots(1, len(maps) + 1)
    image: Any = None
    for axes, (name, scores) in zip(all_axes, maps.items(), strict=False):
        layers = importances[name].base_layers
        image = axes.imshow(scores.numpy(), aspect="auto", vmin=low, vmax=high, origin="lower", cmap="viridis")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("head")
        axes.set_ylabel("layer of the base")
        axes.set_yticks(range(0, len(layers), max(1, len(layers) // 10)), layers[:: max(1, len(layers) // 10)])
    figure.colorbar(image, ax=list(all_axes[:-1]), label="importance")
    for name, one in importances.items():
        all_axes[-1].plot(one.base_layers, one.variances(absolute).numpy(), marker=".", label=name)
    all_axes[-1].set_xlabel("layer of the base")
    all_axes[-1].set_title("variance over heads", fontsize=9)
    all_axes[-1].legend(fontsize=7)
    return figure


def _form(importance: HeadImportance, absolute: bool) -> Any:
    return importance.absolute if absolute else importance.signed
