"""Settings of decoder layers: what a layer computes with beside its tensors, such as the size of a window or a multiplier."""

from collections.abc import Sequence
from typing import Any

from torch import nn

# Settings of a layer by the name of their module within the layer and their own.
Settings = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))


def settings_of(layer: nn.Module) -> Settings:
    """Return the settings of a layer and of the modules within: numbers, names and truth values, and lists of these."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in layer.named_modules()
        for name, value in [("class", type(module).__name__), *vars(module).items()]
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def change_of_settings(before: Sequence[Settings], after: Sequence[Settings], sources: Sequence[int]) -> str | None:
    """Return which layer of a new model has another setting than its source, and what it is; None if none has.

    The index of a layer and the number of layers, which differ by right, are not compared.

    Args:
        before: Settings of each layer of a model.
        after: Settings of each layer of a model that is made from its layers.
        sources: For each layer of the new model, the layer that it is made from.
    """
    for index, source in enumerate(sources):
        for name in sorted(before[source].keys() | after[index].keys()):
            pair = before[source].get(name), after[index].get(name)
            if pair[0] != pair[1] and pair not in ((source, index), (len(before), len(after))):
                return f"layer {index} has {name} = {pair[1]!r} and its source, layer {source}, {pair[0]!r}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
