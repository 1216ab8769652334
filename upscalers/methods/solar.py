"""SOLAR: two overlapping stacks of the base's layers, one on top of the other."""

from typing import Any

from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import SOLAR, register_method
from upscalers.methods.dense_block import DenseMethod
from upscalers.plan.plan import Base, Plan
from upscalers.request.errors import RequestError


@register_method("solar")
class Solar(DenseMethod):
    """Depthwise stacking (section 2): a copy of the base without its last m layers, then a copy without its first m."""

    summary = "depthwise stacking: the base without its last layers, then the base without its first"
    paper = SOLAR
    identity = False
    trainable = "all"
    default_placement = None

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        layers = base.num_layers
        if placement is not None:
            raise RequestError(
                f"placement is {placement!r}, but solar orders the layers itself; expected none. Pass --num-new-layers."
            )
        if layers < 3:
            raise RequestError(
                f"the base has {layers} layers; solar needs at least 3 to leave some out of each stack."
            )
        if num_new_layers is None:
            num_new_layers = layers // 2 + (layers - layers // 2) % 2
        if not 0 < num_new_layers < layers or (layers - num_new_layers) % 2:
            valid = range(2 - layers % 2, layers - 1, 2)
            near = sorted(sorted(valid, key=lambda count: abs(count - num_new_layers))[:2])
            raise RequestError(
                f"num-new-layers is {num_new_layers}; solar leaves the same number of layers out of each of its two stacks, "
                f"so expected K with 0 < K < {layers} and {layers} - K even. The nearest: {' and '.join(map(str, near))}."
            )
        left_out = (layers - num_new_layers) // 2
        order = [*range(layers - left_out), *range(left_out, layers)]
        return Plan(tuple(map(Base, order)), layers)

    def placement_request(self, plan: Plan) -> dict[str, Any]:
        return {"num_new_layers": len(plan.new_indices)}
