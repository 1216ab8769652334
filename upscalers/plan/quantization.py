"""Quantised modules of an upscaled model: modules of the base's layers stay quantised, and new modules are not."""

import copy
import re
from collections.abc import Iterable
from typing import Any

from upscalers.architecture.family import Config
from upscalers.plan.plan import Base, Plan

KEPT_KEY = "modules_to_not_convert"
# The modules that transformers leaves as they are where a config does not list any.
_KEPT_BY_DEFAULT = ["lm_head"]
_LAYER = re.compile(r"(^|\.)layers\.(\d+)(?=\.|$)")


def followed_quantization(config: Config, plan: Plan, new_modules: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of the upscaled model.

    Args:
        config: Raw config of the base, which has a `quantization_config`.
        plan: The layer plan.
        new_modules: Paths of modules, as transformers names them, that the upscaling adds.

    Returns:
        A copy in which modules that are not quantised are listed by their new layers, with the new modules among them.
    """
    quantization = copy.deepcopy(config["quantization_config"])
    kept = quantization.get(KEPT_KEY)
    listed = [
        entry for pattern in (_KEPT_BY_DEFAULT if kept is None else kept) for entry in _in_new_layers(pattern, plan)
    ]
    quantization[KEPT_KEY] = list(dict.fromkeys([*listed, *new_modules]))
    return quantization


def _in_new_layers(pattern: str, plan: Plan) -> list[str]:
    """Return a module's path, once for each layer of the upscaled model that is the layer which the path names."""
    match = _LAYER.search(pattern)
    if match is None:
        return [pattern]
    indices = [
        index for index, layer in enumerate(plan.layers) if isinstance(layer, Base) and layer.index == int(match[2])
    ]
    return [f"{pattern[: match.start(2)]}{index}{pattern[match.end(2) :]}" for index in indices]
