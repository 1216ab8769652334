"""One plain request to each dense method, and what is true of all of them on any family."""

from pathlib import Path
from typing import Any

from tiny import NATIVE_FAMILIES

from upscalers.architecture.layer_tensors import family_of
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import get_method
from upscalers.plan import Plan
from upscalers.record.provenance import UpscaleReport
from upscalers.request import parse_options
from upscalers.runs.upscale import upscale

# Keyword arguments of `upscale` by method. All keep every layer of a base of four as it was.
REQUESTS: dict[str, dict[str, Any]] = {
    "solar": {}, "llama-pro": {}, "avg-deus": {}, "lesa": {"options": {"epochs": 1}}, "opt-deus": {},
    "stack": {"options": {"layers": ["0-1", "0-3", 2]}},
}  # fmt: skip
# Methods with the option `identity`, and its default.
PROMISING = {"llama-pro": "auto", "opt-deus": "auto", "lesa": "none", "avg-deus": "none"}
# Families with norms after attention and feed-forward network.
OUTPUT_NORMS = ("gemma2", "gemma3", "olmo2")


def upscaled(base: Path, output: Path, method: str, verify: bool = False, **changes: Any) -> UpscaleReport:
    """Send the method's plain request, with changes."""
    return upscale(base=base, method=method, output=output, **{**REQUESTS[method], "verify": verify, **changes})


def known(config: dict[str, Any]) -> BaseCheckpoint:
    family = family_of(config)
    return BaseCheckpoint(Path(), config, family, layout_of(config), {})


def planned(config: dict[str, Any], method: str, num_new_layers=None, placement=None, **options: Any) -> Plan:
    chosen = get_method(method)
    return chosen(parse_options(chosen.options_class, options, method)).plan(known(config), num_new_layers, placement)


def upscaled_config(config: dict[str, Any], method: str, options=None, **place: Any) -> dict[str, Any]:
    """The raw config of the upscaled model, from that of the base."""
    chosen = get_method(method)
    made = chosen(parse_options(chosen.options_class, options or {}, method))
    return made.config(known(config), planned(config, method, **place, **(options or {})))


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    return NATIVE_FAMILIES[family].config(**changes).to_dict()
