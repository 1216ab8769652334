"""Stacks: ranges of the base's layers, one on top of the other."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from midus_hf.config.errors import RequestError, first_few
from midus_hf.config.options import option
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Paper, register_method
from upscalers.methods.dense_block import DenseMethod
from upscalers.plan import Base, Plan

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


@dataclass
class StackOptions:
    """Options of `stack`: the ranges."""

    layers: Any = option(
        None,
        "layers of the base from the bottom up, each at least once; ends are included",
        "ranges such as [0-11, 4-15]",
    )


@register_method("stack")
class Stack(DenseMethod):
    """Ranges of the base's layers, where a layer that is in several of them is copied."""

    summary = "ranges of the base's layers on top of one another, with copies of layers that are in several"
    paper: ClassVar[Paper | None] = None
    options_class: ClassVar[type] = StackOptions
    identity = False
    trainable = "all"
    default_placement = None

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        order = [layer for layers in self.ranges(base.num_layers, num_new_layers, placement) for layer in layers]
        return Plan(tuple(map(Base, order)), base.num_layers)

    def ranges(self, num_layers: int, num_new_layers: int | None, placement: str | None) -> list[range]:
        """Return the ranges, lowest in the result first; refuse a left-out layer, no repeat, or no ranges."""
        for name, value in (("num-new-layers", num_new_layers), ("placement", placement)):
            if value is not None:
                raise RequestError(
                    f"{name} is {value!r}, but stack uses the option layers; expected none. Leave it out."
                )
        given = self.options.layers
        last = num_layers - 1
        remedy = f"Pass, for example, --set 'layers=[0-{last}, {last // 2}-{last}]'."
        if given is None:
            raise RequestError(f"layers is missing; expected ranges of the {num_layers} layers of the base. {remedy}")
        ranges = []
        for text in ",".join(map(str, given if isinstance(given, list) else [given])).split(","):
            match = _RANGE.fullmatch(text)
            layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
            if not layers or layers[-1] > last:
                raise RequestError(
                    f"layers has {text.strip()!r}; expected single layers of the base, 0 to {last}, and ascending ranges, ends "
                    f"included. {remedy}"
                )
            ranges.append(layers)
        left_out = sorted(set(range(num_layers)) - {layer for layers in ranges for layer in layers})
        if left_out:
            raise RequestError(
                f"layers leaves out {first_few([*map(str, left_out)])}; expected every layer of the base, 0 to {last}, or strip "
                f"could not restore it. {remedy}"
            )
        if sum(map(len, ranges)) == num_layers:
            raise RequestError(f"layers repeats no layer of the base; expected one at least twice. {remedy}")
        return ranges
