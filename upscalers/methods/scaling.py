"""Scaling of a layer's tensors by role."""

from collections.abc import Mapping
from typing import Any

from midus_hf.config.options import finite_number
from midus_hf.config.wording import near_matches
from upscalers.architecture.family import MATRIX_ROLES, NORM_ROLES
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.dense_block import combination
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import Recipe

# Key of a scale that stands for every role that the scale does not name.
OTHERS = "others"
SCALE_TYPE = "a mapping of roles, or others, to numbers"


def read_scale(scale: Any, what: str) -> dict[str, float]:
    """Return the factors by role of a scale that a person passed.

    Args:
        scale: A mapping of roles to numbers.
        what: Name of the scale in messages.

    Raises:
        RequestError: If the scale is no mapping of names to finite numbers.
    """
    if not isinstance(scale, dict) or not all(isinstance(role, str) for role in scale):
        raise RequestError(f"{what} is {scale!r}; expected a mapping of roles to numbers, such as {{down: 0.5}}.")
    factors = {}
    for role, factor in scale.items():
        number = finite_number(factor)
        if number is None:
            raise RequestError(f"{what}.{role} is {factor!r}; expected a finite number.")
        factors[role] = number
    return factors


def _roles(base: BaseModel) -> set[str]:
    """Return the roles that tensors of the base's layers have."""
    layers = (base.family.layer_tensors(base.config, layer) for layer in range(base.num_layers))
    return {tensor.role for tensors in layers for tensor in tensors.values()}


def check_roles(base: BaseModel, scale: Mapping[str, float], what: str) -> None:
    """Refuse roles that no tensor of the base's layers has.

    Raises:
        RequestError: If a role is unknown. The message lists the roles, or similar ones.
    """
    roles = _roles(base)
    expected = [*sorted(roles), OTHERS]
    for role in scale:
        if role not in expected:
            # A role of other families is not misspelt, so list this family's roles instead of similar names.
            of_others = role in NORM_ROLES | {*MATRIX_ROLES}
            hint = f"Expected one of: {', '.join(expected)}." if of_others else near_matches(role, expected)
            raise RequestError(
                f"{what} names the role {role!r}, which no tensor of a {base.family.model_type} layer has. {hint}"
            )


_NORM_BEHIND = {
    "output_projection": "attention_output_norm",
    "down": "mlp_output_norm",
    "query": "query_norm",
    "key": "key_norm",
}


def without_effect(base: BaseModel, scale: Mapping[str, float]) -> list[str]:
    """Return warnings about factors that change nothing because a norm follows the scaled tensors."""
    roles = _roles(base)
    return [
        f"scale.{role} changes nothing in {base.family.model_type}: a norm follows. Scale {norm} instead."
        for role, norm in _NORM_BEHIND.items()
        if norm in roles and scale.get(role, 1.0) > 0 and scale.get(role, 1.0) != 1
    ]


def scaled_layer(base: BaseModel, layer: int, scale: Mapping[str, float]) -> dict[str, Recipe]:
    """Return recipes for a base layer with each tensor times the factor of its role; norms are scaled by their gains."""
    return {
        name: combination(base, name, tensor, [(layer, scale.get(tensor.role, scale.get(OTHERS, 1.0)))])
        for name, tensor in base.family.layer_tensors(base.config, layer).items()
    }
