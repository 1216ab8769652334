"""Method `slices`: slices of the base's layers in any order, each with a scale."""

from dataclasses import dataclass
from typing import Any, Literal

from midus_hf.config.options import option
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.dense_block import DenseMethod, whole_layer
from upscalers.methods.scaling import SCALE_TYPE, check_roles, read_scale, scaled_layer, without_effect
from upscalers.plan.plan import Base, New, Plan
from upscalers.request.errors import RequestError
from upscalers.request.options import parse_options
from upscalers.tensors.recipes import Recipe


@dataclass
class Slice:
    """Consecutive layers of the base."""

    layers: Any = option(None, "first layer and the one after the last, [first, end]", type="two integers")
    scale: Any = option(None, "factors by role; default: 1 for all", type=SCALE_TYPE)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list | tuple) or [type(bound) for bound in self.layers] != [int, int]:
            raise RequestError(f"a slice has layers = {self.layers!r}; expected [first, end], the end not included.")
        self.scale = read_scale({} if self.scale is None else self.scale, "the scale of a slice")

    @property
    def is_verbatim(self) -> bool:
        """True if the layers are taken over unchanged."""
        return all(factor == 1 for factor in self.scale.values())


@dataclass
class SlicesOptions:
    """Options of `slices`: the slices, and what is trained."""

    slices: Any = option(
        None,
        "a list of {layers: [first, end], scale: {role: factor}}, the end not included, the scale optional",
        type="a list of slices",
    )
    trainable: Literal["all", "new"] = option(
        "all", "what is trained afterwards; new means layers that are repeated or scaled"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.slices, list) or not self.slices:
            raise RequestError(
                f"slices is {self.slices!r}; expected a list such as [{{layers: [0, 12]}}, {{layers: [4, 16]}}]. Give it in a "
                "--config file under options, or with --set."
            )
        if not all(isinstance(mapping, dict) for mapping in self.slices):
            raise RequestError(
                "slices holds something that is no mapping; expected {layers: [first, end]} in each place."
            )
        self.parsed()

    def parsed(self) -> list[Slice]:
        """Return the slices, checked."""
        return [parse_options(Slice, mapping, "a slice") for mapping in self.slices]


@register_method("slices")
class Slices(DenseMethod):
    """Slices of the base stacked in a given order, which covers every passthrough merge of a single model."""

    summary = "slices of the base in any order, repeated, left out or scaled by role"
    paper = None
    options_class = SlicesOptions
    identity = False
    trainable = "all"
    default_placement = None

    @property
    def trained(self) -> Literal["new", "all"]:
        return self.options.trainable

    def check(self, base: BaseModel) -> None:
        super().check(base)
        for piece in self.options.parsed():
            first, end = piece.layers
            if not 0 <= first < end <= base.num_layers:
                raise RequestError(
                    f"a slice has layers = {piece.layers}; expected 0 <= first < end <= {base.num_layers}, the number of base "
                    "layers. The end is not included."
                )
            check_roles(base, piece.scale, "the scale of a slice")

    def plan(self, base: BaseModel, num_new_layers: int | None, placement: str | None) -> Plan:
        for name, value in (("num-new-layers", num_new_layers), ("placement", placement)):
            if value is not None:
                raise RequestError(f"{name} is {value!r}, but slices say which layers there are; expected none.")
        order = [(layer, piece.is_verbatim) for piece in self.options.parsed() for layer in range(*piece.layers)]
        layers: list[Base | New] = []
        for index, (source, is_verbatim) in enumerate(order):
            if is_verbatim:
                layers.append(Base(source))
                continue
            before = [layer for layer, verbatim in order[:index] if verbatim]
            after = [layer for layer, verbatim in order[index + 1 :] if verbatim]
            layers.append(
                New(
                    before[-1] if before else None,
                    after[0] if after else None,
                    sources=(whole_layer(base, source, index),),
                )
            )
        plan = Plan(tuple(layers), base.num_layers)
        if layers == [Base(layer) for layer in range(base.num_layers)]:
            raise RequestError("the slices are the base as it is; expected a layer more, less or changed.")
        if self.options.trainable == "new" and not plan.new_indices:
            raise RequestError("trainable is 'new', but the slices repeat and scale nothing; expected 'all'.")
        return plan

    def default_remark(self, base: BaseModel, plan: Plan, placement: str | None) -> str | None:
        return None

    def pattern_remedy(self, base: BaseModel, plan: Plan) -> str:
        period = base.family.period_of(base.config) or 1
        if period == 1:
            return "Slices keep the pattern where no sliding layer stands before a full one."
        return f"Slices keep the pattern where every layer moves by a multiple of {period}."

    def concerns(self, base: BaseModel, plan: Plan) -> list[str]:
        warnings = (concern for piece in self.options.parsed() for concern in without_effect(base, piece.scale))
        return list(dict.fromkeys(warnings))

    def placement_request(self, plan: Plan) -> dict[str, Any]:
        return {}

    def recipes(self, base: BaseModel, plan: Plan, seed: int) -> list[dict[str, Recipe]]:
        return [
            self.copied_layer(base, layer) if piece.is_verbatim else scaled_layer(base, layer, piece.scale)
            for piece in self.options.parsed()
            for layer in range(*piece.layers)
        ]
