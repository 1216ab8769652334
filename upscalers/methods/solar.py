"""SOLAR: two overlapping stacks of the base's layers, one on top of the other."""

from typing import Any

from midus_hf.config.errors import RequestError
from upscalers.methods.contract import NoOptions, Paper, register_method
from upscalers.methods.stack import Stack
from upscalers.plan import Plan


@register_method("solar")
class Solar(Stack):
    """Depthwise stacking (section 2): the base without its last m layers, then without its first m."""

    summary = "depthwise stacking: the base without its last layers, then the base without its first"
    paper = Paper(
        key="solar",
        title="SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
        authors=(
            "Kim, Dahyun and Park, Chanjun and Kim, Sanghoon and Lee, Wonsung and Song, Wonho and Kim, Yunsu and "
            "Kim, Hyeonwoo and Kim, Yungi and Lee, Hyeonju and Kim, Jihoo and others"
        ),
        year=2023,
        reference="arXiv:2312.15166",
    )
    options_class = NoOptions

    def ranges(self, num_layers: int, num_new_layers: int | None, placement: str | None) -> list[range]:
        """Return the ranges of both stacks; refuse a placement, and numbers that leave no equal stacks."""
        if placement is not None:
            raise RequestError(
                f"placement is {placement!r}, but solar orders the layers itself; expected none. Pass --num-new-layers."
            )
        if num_layers < 3:
            raise RequestError(
                f"the base has {num_layers} layers; solar needs at least 3 to leave some out of each stack."
            )
        if num_new_layers is None:
            num_new_layers = num_layers // 2 + (num_layers - num_layers // 2) % 2
        if not 0 < num_new_layers < num_layers or (num_layers - num_new_layers) % 2:
            valid = range(2 - num_layers % 2, num_layers - 1, 2)
            near = sorted(sorted(valid, key=lambda count: abs(count - num_new_layers))[:2])
            raise RequestError(
                f"num-new-layers is {num_new_layers}; solar leaves the same number of layers out of each of its two stacks, "
                f"so expected K with 0 < K < {num_layers} and {num_layers} - K even. The nearest: {' and '.join(map(str, near))}."
            )
        left_out = (num_layers - num_new_layers) // 2
        return [range(num_layers - left_out), range(left_out, num_layers)]

    def placement_request(self, plan: Plan) -> dict[str, Any]:
        return {"num_new_layers": len(plan.new_indices)}
