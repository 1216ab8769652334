"""Sizes of the model that a memory is built for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, from its config.

    Args:
        hidden_size: D, the width of the residual stream.
        num_heads: H, query heads of each attention.
        head_dim: d, the width of one head. Default: D / H.
        num_key_value_heads: Key and value heads of each attention. Default: H.
        intermediate_size: Hidden units of each feed-forward network. Default: 0, unknown.
        num_layers: L, the number of layers, memory blocks included. Default: 0, unknown.
        activation: Name that transformers has for the activation of the gated feed-forward network. Default: `"silu"`.
        layers: Sizes at each layer, if some layers have other sizes (Gemma 4). Default: none, all layers have these.
    """

    hidden_size: int
    num_heads: int
    head_dim: int = 0
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    num_layers: int = 0
    activation: str = "silu"
    layers: tuple["ModelSizes", ...] = ()

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_heads)

    @classmethod
    def from_config(cls, config: Any) -> "ModelSizes":
        """Return the sizes in a config of transformers, those of the layers that have no sizes of their own (Gemma 4)."""

        def size(name: str) -> int:
            try:
                value = getattr(config, name, None)
            except RuntimeError:  # transformers refuses to read an attribute that differs between layers
                value = vars(config).get(name)
            return value if isinstance(value, int) else 0

        is_heterogeneous = getattr(config, "is_heterogeneous", False)
        return cls(
            hidden_size=config.hidden_size,
            num_heads=size("num_attention_heads") or 1,
            head_dim=size("head_dim"),
            num_key_value_heads=size("num_key_value_heads"),
            intermediate_size=size("intermediate_size"),
            num_layers=config.num_hidden_layers,
            activation=activation_of(vars(config)),
            layers=tuple(map(cls.from_config, config.per_layer_config)) if is_heterogeneous else (),
        )

    def at(self, layer: int) -> "ModelSizes":
        """Return the sizes at a layer."""
        return self.layers[layer] if self.layers else self


def activation_of(config: Mapping[str, Any]) -> str:
    """Return the activation of the feed-forward network in a raw config, whose key depends on the family; else `"silu"`."""
    return config.get("hidden_activation") or config.get("hidden_act") or "silu"
