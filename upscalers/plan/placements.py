"""Placement policies: the indices of the new layers in the upscaled model (MIDUS, appendix D)."""

import contextlib
from collections.abc import Callable, Sequence

from midus_hf.config.wording import near_matches
from upscalers.request.errors import RequestError

# The policy whose new layers come in whole periods, each made from layers of the same phase.
WHOLE_PERIODS = "whole-periods"


def place(placement: str, num_layers: int, num_new_layers: int | None, period: int | None = 1) -> list[int]:
    """Return the indices, in the upscaled model, of new layers that a policy's name or an explicit list stands for.

    Args:
        placement: Name of a policy, or indices joined by commas.
        num_layers: L, number of layers of the base.
        num_new_layers: K, number of new layers; None stands for the default of the policy, L / 2 or near it, or for the
            length of an explicit list.
        period: Number of layers after which the attention types of the base repeat; None where they do not. Default: 1.

    Raises:
        RequestError: If the policy is unknown, or cannot place K layers among L.
    """
    if placement.replace(",", "").replace("-", "").replace(" ", "").isdigit():
        try:
            indices = [int(part) for part in placement.split(",")]
        except ValueError:
            raise RequestError(
                f"placement is {placement!r}; expected indices joined by commas, such as 1,4,7."
            ) from None
        if num_new_layers is not None and num_new_layers != len(indices):
            raise RequestError(
                f"num-new-layers is {num_new_layers}, but placement lists {len(indices)} indices. Give one of the two."
            )
        return indices
    if placement not in PLACEMENTS:
        raise RequestError(
            f"placement {placement!r} is unknown. {near_matches(placement, [*PLACEMENTS, 'indices such as 3,7,11'])}"
        )
    policy = PLACEMENTS[placement]
    if num_new_layers is not None:
        if num_new_layers < 1:
            raise RequestError(f"num-new-layers is {num_new_layers}; expected at least 1.")
        return policy(num_layers, num_new_layers, period)
    if num_layers < 2:
        raise RequestError("the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers.")
    numbers: Sequence[int] = range(num_layers // 2, 0, -1)
    if placement == WHOLE_PERIODS:  # the multiple nearest to half
        multiples = range(period or 1, max(num_layers, period or 1) + 1, period or 1)
        numbers = sorted(multiples, key=lambda number: (abs(2 * number - num_layers), number))
    for number in numbers:
        with contextlib.suppress(RequestError):
            return policy(num_layers, number, period)
    return policy(num_layers, numbers[0], period)  # which is refused with the reason


def _stride(name: str, num_layers: int, num_new_layers: int) -> int:
    if num_layers % num_new_layers:
        divisors = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} needs a divisor of the {num_layers} base layers: "
            f"{', '.join(map(str, divisors))}. Choose one of them, another placement, or list the indices."
        )
    return num_layers // num_new_layers


def distributed(num_layers: int, num_new_layers: int, _period: int | None = 1) -> list[int]:
    """Place one new layer before the last layer of each of K equal groups: the default of MIDUS (equation 10)."""
    stride = _stride("distributed", num_layers, num_new_layers)
    return [group * (stride + 1) + stride - 1 for group in range(num_new_layers)]


def llama_pro(num_layers: int, num_new_layers: int, _period: int | None = 1) -> list[int]:
    """Place one new layer after each of K equal groups (LLaMA-Pro; MIDUS, equation 9)."""
    stride = _stride("llama-pro", num_layers, num_new_layers)
    return [(group + 1) * stride + group for group in range(num_new_layers)]


def top_heavy(num_layers: int, num_new_layers: int, _period: int | None = 1) -> list[int]:
    """Place one new layer in each of the last K gaps between base layers (OpT-DeUS, LESA)."""
    if num_new_layers > num_layers - 1:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement top-heavy fits at most {num_layers - 1}, one in each gap "
            f"between the {num_layers} base layers."
        )
    return [num_layers - num_new_layers + 2 * index for index in range(num_new_layers)]


def bottom_heavy(num_layers: int, num_new_layers: int, _period: int | None = 1) -> list[int]:
    """Place one new layer before each of the first K base layers."""
    if num_new_layers > num_layers:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement bottom-heavy fits at most {num_layers}, one before each "
            "base layer."
        )
    return [2 * index for index in range(num_new_layers)]


def whole_periods(num_layers: int, num_new_layers: int, period: int | None = 1) -> list[int]:
    """Place p new layers in a row before the last period of each of K / p groups of periods of about equal size.

    Every layer, old or new, stands at an index that implies the layer's attention type. Where all types are alike, p
    is 1, and this is `distributed` generalised to any K up to L.
    """
    if period is None:
        raise RequestError(
            "the attention types of the base's layers do not repeat; placement whole-periods needs a pattern to keep. Choose "
            "another placement."
        )
    num_periods = num_layers // period
    if not num_periods:
        raise RequestError(
            f"the base has {num_layers} layers, fewer than the {period} after which attention types repeat; placement "
            "whole-periods needs a period of them. Choose another placement."
        )
    num_groups, rest = divmod(num_new_layers, period)
    if rest or num_groups > num_periods:
        valid = range(period, num_periods * period + 1, period)
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement whole-periods needs a multiple of {period}, after which attention "
            f"types repeat, up to {valid[-1]}. Choose {' or '.join(map(str, _nearest(valid, num_new_layers)))}."
        )
    # Group ends are rounded up: if there are more periods than groups, the first group has at least two periods.
    ends = [-(-(group + 1) * num_periods // num_groups) for group in range(num_groups)]
    starts = [(end - 1 + group) * period for group, end in enumerate(ends)]
    return [start + phase for start in starts for phase in range(period)]


def _nearest(valid: range, number: int) -> list[int]:
    return sorted(sorted(valid, key=lambda count: abs(count - number))[:2])


# Functions `(L, K, p) -> K ascending indices`, where p is the period of the base's attention types, or None if they do not repeat.
# They raise `RequestError` if they cannot place that many layers.
PLACEMENTS: dict[str, Callable[[int, int, int | None], list[int]]] = {
    "distributed": distributed,
    "llama-pro": llama_pro,
    "top-heavy": top_heavy,
    "bottom-heavy": bottom_heavy,
    WHOLE_PERIODS: whole_periods,
}
