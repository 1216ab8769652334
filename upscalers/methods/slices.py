"""Methods `slices` and `attenuated-copy`, which take layers of the base as they are, or with a scale on chosen roles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midus_hf.config.options import finite_number, option
from midus_hf.config.wording import near_matches
from upscalers.architecture.family import MATRIX_ROLES, NORM_ROLES
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.dense_block import WRITING_ROLES, DenseMethod, combination, layer_before, whole_layer
from upscalers.plan.plan import Base, New, Plan
from upscalers.request.errors import RequestError
from upscalers.request.options import parse_options
from upscalers.tensors.recipes import Recipe

# Key of a scale that stands for every role that the scale does not name.
OTHERS = "others"
SCALE_TYPE = "a mapping of roles, or others, to numbers"


def read_scale(scale: Any, subject: str) -> dict[str, float]:
    """Return the factors by role of a scale that a person passed; `subject` names the scale in messages.

    Raises:
        RequestError: If the scale is no mapping of names to finite numbers.
    """
    if not isinstance(scale, dict) or not all(isinstance(role, str) for role in scale):
        raise RequestError(f"{subject} is {scale!r}; expected a mapping of roles to numbers, such as {{down: 0.5}}.")
    factors = {}
    for role, factor in scale.items():
        number = finite_number(factor)
        if number is None:
            raise RequestError(f"{subject}.{role} is {factor!r}; expected a finite number.")
        factors[role] = number
    return factors


def _roles(base: BaseModel) -> set[str]:
    """Return the roles that tensors of the base's layers have."""
    layers = (base.layout.backbone_layers[layer] for layer in range(base.num_layers))
    return {tensor.role for tensors in layers for tensor in tensors.values()}


def check_roles(base: BaseModel, scale: Mapping[str, float], subject: str) -> None:
    """Refuse roles that no tensor of the base's layers has.

    Raises:
        RequestError: If a role is unknown. The message lists the roles, or similar ones.
    """
    roles = _roles(base)
    expected = [*sorted(roles), OTHERS]
    for role in scale:
        if role not in expected:
            # A role of other families is not misspelt, so list this family's roles instead of similar names.
            is_of_other_types = role in NORM_ROLES | {*MATRIX_ROLES}
            hint = f"Expected one of: {', '.join(expected)}." if is_of_other_types else near_matches(role, expected)
            raise RequestError(
                f"{subject} names the role {role!r}, which no tensor of a {base.family.model_type} layer has. {hint}"
            )


def scaled_layer(base: BaseModel, layer: int, scale: Mapping[str, float]) -> dict[str, Recipe]:
    """Return recipes for a base layer with each tensor times the factor of its role; norms are scaled by their gains."""
    return {
        name: combination(base, name, tensor, [(layer, scale.get(tensor.role, scale.get(OTHERS, 1.0)))])
        for name, tensor in base.layout.backbone_layers[layer].items()
    }


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
    trainable: Literal["new", "all"] = "all"
    default_placement = None

    def __init__(self, options: SlicesOptions):
        super().__init__(options)
        self.trainable = options.trainable

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

    def recipes(self, base: BaseModel, plan: Plan, seed: int) -> list[dict[str, Recipe]]:
        return [
            self.copied_layer(base, layer) if piece.is_verbatim else scaled_layer(base, layer, piece.scale)
            for piece in self.options.parsed()
            for layer in range(*piece.layers)
        ]


@dataclass
class AttenuatedCopyOptions:
    """Options of `attenuated-copy`: factors that attenuate a copy."""

    scale: Any = option(
        None,
        "factors by role, such as {output_projection: 0.5, down: 0.5, query: 0.84}; default: sqrt(1/2) on what writes to "
        "the residual stream, which is the output projection and the down projection or the norms behind them",
        type=SCALE_TYPE,
    )

    def __post_init__(self) -> None:
        if self.scale is not None:
            self.scale = read_scale(self.scale, "scale")


@register_method("attenuated-copy")
class AttenuatedCopy(DenseMethod):
    """Copies of evenly spaced layers with chosen tensors scaled, as people make them by hand with passthrough merges."""

    summary = "copies of evenly spaced layers, with a scale on chosen roles"
    paper = None
    options_class = AttenuatedCopyOptions
    identity = False
    default_placement = "llama-pro"

    def check(self, base: BaseModel) -> None:
        super().check(base)
        if self.options.scale is not None:
            check_roles(base, self.options.scale, "scale")

    def scale(self, base: BaseModel) -> dict[str, float]:
        """Return the factors by role."""
        if self.options.scale is not None:
            return self.options.scale
        if base.layout.norms_behind:
            roles = ("attention_output_norm", "mlp_output_norm", "per_layer_output_norm")
        else:
            roles = ("output_projection", "down", "per_layer_projection")
        return dict.fromkeys(roles, 0.5**0.5)

    def needed_roles(self, base: BaseModel) -> frozenset[str]:
        return frozenset(self.scale(base)) & WRITING_ROLES if self.options.scale is None else frozenset()

    def sources(self, base: BaseModel, layer: New, index: int, number: int) -> tuple[int, ...]:
        return (layer_before(base, layer, index),)

    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        return scaled_layer(base, layer.sources[0], self.scale(base))
