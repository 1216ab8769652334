"""Placement policies: the indices of the new layers in the upscaled model (MIDUS, appendix D)."""

import contextlib
from collections.abc import Callable

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import one_of


def place(placement: str, num_layers: int, num_new_layers: int | None) -> list[int]:
    """Return the indices of new layers in the upscaled model, by the name of a policy or by indices joined by commas."""
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
        raise RequestError(f"placement {placement!r} is unknown. {one_of([*PLACEMENTS, 'indices such as 3,7,11'])}")
    policy = PLACEMENTS[placement]
    if num_new_layers is not None:
        if num_new_layers < 1:
            raise RequestError(f"num-new-layers is {num_new_layers}; expected at least 1.")
        return policy(num_layers, num_new_layers)
    if num_layers < 2:
        raise RequestError("the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers.")
    for number in range(num_layers // 2, 1, -1):
        with contextlib.suppress(RequestError):
            return policy(num_layers, number)
    return policy(num_layers, 1)  # which always fits


def _stride(name: str, num_layers: int, num_new_layers: int) -> int:
    if num_layers % num_new_layers:
        divisors = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} needs a divisor of the {num_layers} base layers: "
            f"{', '.join(map(str, divisors))}. Choose one of them, another placement, or list the indices."
        )
    return num_layers // num_new_layers


def distributed(num_layers: int, num_new_layers: int) -> list[int]:
    """Place one new layer before the last layer of each of K equal groups: the default of MIDUS (equation 10)."""
    stride = _stride("distributed", num_layers, num_new_layers)
    return [group * (stride + 1) + stride - 1 for group in range(num_new_layers)]


def llama_pro(num_layers: int, num_new_layers: int) -> list[int]:
    """Place one new layer after each of K equal groups (LLaMA-Pro; MIDUS, equation 9)."""
    stride = _stride("llama-pro", num_layers, num_new_layers)
    return [(group + 1) * stride + group for group in range(num_new_layers)]


def _check_most(name: str, num_new_layers: int, most: int, place: str, num_layers: int) -> None:
    if num_new_layers > most:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} fits at most {most}, one {place} the {num_layers} base layers."
        )


def top_heavy(num_layers: int, num_new_layers: int) -> list[int]:
    """Place one new layer in each of the last K gaps between base layers (OpT-DeUS, LESA)."""
    _check_most("top-heavy", num_new_layers, num_layers - 1, "in each gap between", num_layers)
    return [num_layers - num_new_layers + 2 * index for index in range(num_new_layers)]


def bottom_heavy(num_layers: int, num_new_layers: int) -> list[int]:
    """Place one new layer before each of the first K base layers."""
    _check_most("bottom-heavy", num_new_layers, num_layers, "before each of", num_layers)
    return [2 * index for index in range(num_new_layers)]


# Functions `(L, K) -> K ascending indices`, which raise `RequestError` if they cannot place that many layers.
PLACEMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "distributed": distributed,
    "llama-pro": llama_pro,
    "top-heavy": top_heavy,
    "bottom-heavy": bottom_heavy,
}
