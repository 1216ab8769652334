"""Placement policies: at which indices of the upscaled model the new layers stand (MIDUS, appendix D)."""

from collections.abc import Callable

from upscalers.engine.errors import RequestError, near_matches

Placement = Callable[[int, int], list[int]]
PLACEMENTS: dict[str, Placement] = {}


def register_placement(name: str) -> Callable[[Placement], Placement]:
    """Register a policy `(L, K) -> K ascending indices` under a name.

    Raises:
        ValueError: If the name is taken.
    """
    if name in PLACEMENTS:
        raise ValueError(f"placement {name!r} is already registered; choose another name.")

    def decorate(policy: Placement) -> Placement:
        PLACEMENTS[name] = policy
        return policy

    return decorate


def place(placement: str, num_layers: int, num_new_layers: int | None) -> list[int]:
    """Resolve a policy's name, or an explicit list, to indices.

    Args:
        placement: Name of a policy, or indices joined by commas.
        num_layers: L, layers of the base.
        num_new_layers: K. Default: L // 2, or as many as the explicit list has.

    Returns:
        Indices of the new layers in the upscaled model.

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
            f"placement {placement!r} is unknown. {near_matches(placement, [*PLACEMENTS, 'I,J,K,...'])}"
        )
    if num_new_layers is None:
        if num_layers < 2:
            raise RequestError(
                "the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers."
            )
        num_new_layers = num_layers // 2
    if num_new_layers < 1:
        raise RequestError(f"num-new-layers is {num_new_layers}; expected at least 1.")
    return PLACEMENTS[placement](num_layers, num_new_layers)


def _stride(name: str, num_layers: int, num_new_layers: int) -> int:
    if num_layers % num_new_layers:
        divisors = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement {name} needs a divisor of the {num_layers} base layers: "
            f"{', '.join(map(str, divisors))}. Choose one of them, another placement, or list the indices."
        )
    return num_layers // num_new_layers


@register_placement("distributed")
def distributed(num_layers: int, num_new_layers: int) -> list[int]:
    """One new layer before the last layer of each of K equal groups: the default of MIDUS (equation 10)."""
    stride = _stride("distributed", num_layers, num_new_layers)
    return [group * (stride + 1) + stride - 1 for group in range(num_new_layers)]


@register_placement("llama-pro")
def llama_pro(num_layers: int, num_new_layers: int) -> list[int]:
    """One new layer after each of K equal groups (LLaMA-Pro; MIDUS, equation 9)."""
    stride = _stride("llama-pro", num_layers, num_new_layers)
    return [(group + 1) * stride + group for group in range(num_new_layers)]


@register_placement("top-heavy")
def top_heavy(num_layers: int, num_new_layers: int) -> list[int]:
    """One new layer in each of the last K gaps between base layers (OpT-DeUS, LESA)."""
    if num_new_layers > num_layers - 1:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement top-heavy fits at most {num_layers - 1}, one in each gap "
            f"between the {num_layers} base layers."
        )
    return [num_layers - num_new_layers + 2 * index for index in range(num_new_layers)]


@register_placement("bottom-heavy")
def bottom_heavy(num_layers: int, num_new_layers: int) -> list[int]:
    """One new layer before each of the first K base layers."""
    if num_new_layers > num_layers:
        raise RequestError(
            f"num-new-layers is {num_new_layers}; placement bottom-heavy fits at most {num_layers}, one before each "
            "base layer."
        )
    return [2 * index for index in range(num_new_layers)]
