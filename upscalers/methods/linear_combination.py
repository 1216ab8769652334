"""Method `linear-combination`: new layers as linear combinations of any layers of the base."""

import re
from dataclasses import dataclass, replace
from typing import Any

from midus_hf.config.options import finite_number, option
from upscalers.architecture.family import LayerTensor
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.dense_block import (
    IDENTITY_HELP,
    DenseMethod,
    IdentityInit,
    combination,
    mixed_types_concern,
    whole_layer,
)
from upscalers.plan.plan import New, Plan
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import Recipe

_LAYER = re.compile(r"^(?:(?P<index>-?\d+)|(?P<side>previous|next)\s*(?P<offset>[+-]\s*\d+)?)$", re.ASCII)


@dataclass
class LinearCombinationOptions:
    """Options of `linear-combination`: the base layers that new layers are combined from."""

    coefficients: Any = option(
        {"previous": 0.5, "next": 0.5},
        "base layers and their coefficients: indices, or previous and next, also previous-1 or next+2; one mapping for "
        "all new layers, or a list with one for each",
        type="a mapping or a list of mappings",
    )
    identity: IdentityInit = option("none", IDENTITY_HELP)

    def __post_init__(self) -> None:
        mappings = self.coefficients if isinstance(self.coefficients, list) else [self.coefficients]
        if not mappings or not all(isinstance(mapping, dict) and mapping for mapping in mappings):
            raise RequestError(
                f"coefficients is {self.coefficients!r}; expected a mapping such as {{previous: 0.5, next: 0.5}}, or a list "
                "with one for each new layer."
            )
        for mapping in mappings:
            for layer, coefficient in mapping.items():
                if isinstance(layer, bool) or not _LAYER.match(str(layer)):
                    raise RequestError(
                        f"coefficients names the layer {layer!r}; expected the index of a base layer, or previous or next, "
                        "such as previous-1."
                    )
                if finite_number(coefficient) is None:
                    raise RequestError(
                        f"the coefficient of layer {layer} is {coefficient!r}; expected a finite number."
                    )


@register_method("linear-combination")
class LinearCombination(DenseMethod):
    """New layers with each tensor `sum_j c_j W_j` over base layers j, with coefficients that a person gives (LiGO
    learns them).
    """

    summary = "new layers are linear combinations of any base layers, with given coefficients"
    paper = None
    options_class = LinearCombinationOptions
    identity = False
    default_placement = "top-heavy"

    def plan(self, base: BaseModel, num_new_layers: int | None, placement: str | None) -> Plan:
        plan = super().plan(base, num_new_layers, placement)
        mappings = self.options.coefficients
        if isinstance(mappings, list) and len(mappings) != len(plan.new_indices):
            raise RequestError(
                f"coefficients lists {len(mappings)} mappings for {len(plan.new_indices)} new layers; expected one for each, or a "
                "single mapping for all."
            )
        layers = list(plan.layers)
        for number, index in enumerate(plan.new_indices):
            layer = layers[index]
            assert isinstance(layer, New)
            terms = self._terms(base, layer, index, number)
            layers[index] = replace(layer, coefficients=tuple(terms[source] for source in layer.sources))
        return Plan(tuple(layers), plan.num_base_layers)

    def sources(self, base: BaseModel, layer: New, index: int, number: int) -> tuple[int, ...]:
        terms = self._terms(base, layer, index, number)
        return tuple(sorted(terms, key=lambda source: (-abs(terms[source]), source != layer.next, source)))

    def _terms(self, base: BaseModel, layer: New, index: int, number: int) -> dict[int, float]:
        """Return the coefficient of each base layer; coefficients of a layer that is named twice are summed."""
        coefficients = self.options.coefficients
        mapping = coefficients[min(number, len(coefficients) - 1)] if isinstance(coefficients, list) else coefficients
        terms: dict[int, float] = {}
        for name, coefficient in mapping.items():
            source = _resolved(name, layer)
            if source is None or not 0 <= source < base.num_layers:
                raise RequestError(
                    f"coefficients names {name} for new layer {index}, which stands {layer.place}; expected base layers from 0 "
                    f"to {base.num_layers - 1}. Choose another placement or other layers."
                )
            source = whole_layer(base, source, index)
            terms[source] = terms.get(source, 0.0) + float(coefficient)
        return terms

    def concerns(self, base: BaseModel, plan: Plan) -> list[str]:
        return mixed_types_concern(base, plan, "Name layers of one type in coefficients.")

    def tensor_recipe(self, base: BaseModel, layer: New, name: str, tensor: LayerTensor) -> Recipe:
        return combination(base, name, tensor, list(zip(layer.sources, layer.coefficients, strict=True)))


def _resolved(name: int | str, layer: New) -> int | None:
    """Return the base layer that a name stands for beside a new layer; None if there is no layer on that side."""
    match = _LAYER.match(str(name))
    assert match
    if match["index"]:
        return int(match["index"])
    anchor = layer.previous if match["side"] == "previous" else layer.next
    return None if anchor is None else anchor + int((match["offset"] or "0").replace(" ", ""))
