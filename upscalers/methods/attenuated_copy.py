"""Method `attenuated-copy`: copies of layers that add less to the residual stream than the originals."""

from dataclasses import dataclass
from typing import Any

from midus_hf.config.options import option
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.dense_block import WRITING_ROLES, DenseMethod, layer_before
from upscalers.methods.scaling import SCALE_TYPE, check_roles, read_scale, scaled_layer, without_effect
from upscalers.plan.plan import New, Plan
from upscalers.tensors.recipes import Recipe

_HALF_THE_POWER = 0.5**0.5


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
        if base.family.norms_behind(base.config):
            roles = ("attention_output_norm", "mlp_output_norm", "per_layer_output_norm")
        else:
            roles = ("output_projection", "down", "per_layer_projection")
        return dict.fromkeys(roles, _HALF_THE_POWER)

    def needed_roles(self, base: BaseModel) -> frozenset[str]:
        return frozenset(self.scale(base)) & WRITING_ROLES if self.options.scale is None else frozenset()

    def sources(self, base: BaseModel, layer: New, index: int, number: int) -> tuple[int, ...]:
        return (layer_before(base, layer, index),)

    def concerns(self, base: BaseModel, plan: Plan) -> list[str]:
        return without_effect(base, self.scale(base))

    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        return scaled_layer(base, layer.sources[0], self.scale(base))
