"""Declarations of tensors - shape, role and initial values - and the sizes of the model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

# `key`: is compared with queries. `value`: holds what is retrieved, one row per slot in the dimension before the last.
# `transform`: makes values from other values. `projection`: any other linear map. `norm`: gain or bias of a norm.
# `gate`: scales the memory's output. `router`: chooses parts of a memory. `buffer`: not a parameter.
TrainedRole = Literal["key", "value", "transform", "projection", "norm", "gate", "router"]
Role = Literal[TrainedRole, "buffer"]


class Initial(Protocol):
    """Initial values of a tensor."""

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        """Fill `tensor` in place. Generators in equal states give equal bytes."""


@dataclass(frozen=True)
class Constant:
    """The same value in every element."""

    value: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.fill_(self.value)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between `-bound` and `bound`."""

    bound: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean zero and standard deviation `std`."""

    std: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.normal_(0.0, self.std, generator=generator)


# Share of a normal distribution within two standard deviations of the mean.
_WITHIN_TWO = math.erf(math.sqrt(2))


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution with mean zero and standard deviation `std`, cut off at two standard deviations."""

    std: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        # The inverse of the distribution function takes exactly one draw per element.
        tensor.uniform_(-_WITHIN_TWO, _WITHIN_TWO, generator=generator).erfinv_().mul_(self.std * math.sqrt(2))


@dataclass(frozen=True)
class LateInitial:
    """Initial values from a slow `make(*arguments)`, which is called only when a tensor is filled."""

    make: Callable[..., Initial]
    arguments: tuple[Any, ...]

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        self.make(*self.arguments).fill(tensor, generator)


ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class DeclaredTensor:
    """A memory's tensor: shape, role, initial values, a buffer's integer dtype (empty: the model's)."""

    shape: tuple[int, ...]
    role: Role
    initial: Initial
    dtype: Literal["", "int64"] = ""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, from its config."""

    hidden_size: int  # D, the width of the residual stream
    num_heads: int  # H, query heads of each attention
    head_dim: int = 0  # d, the width of one head; by default D / H
    num_key_value_heads: int = 0  # K; by default H
    intermediate_size: int = 0  # hidden units of each feed-forward network; 0: unknown
    num_layers: int = 0  # L, memory blocks included; 0: unknown
    activation: str = "silu"  # of the gated feed-forward network, as transformers names it
    layers: tuple["ModelSizes", ...] = ()  # at each layer, if some have other sizes (Gemma 4)

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_heads)

    @classmethod
    def from_config(cls, config: Any) -> "ModelSizes":
        """Return a transformers config's sizes, of the layers without sizes of their own (Gemma 4)."""
        values = vars(config)
        sizes = dict[str, int]()
        for name in ("num_attention_heads", "head_dim", "num_key_value_heads", "intermediate_size"):
            try:
                value = getattr(config, name, None)
            except RuntimeError:  # transformers refuses to read an attribute that differs between layers
                value = values.get(name)
            sizes[name] = value if isinstance(value, int) else 0
        is_heterogeneous = getattr(config, "is_heterogeneous", False)
        return cls(
            hidden_size=config.hidden_size,
            num_heads=sizes.pop("num_attention_heads") or 1,
            **sizes,
            num_layers=config.num_hidden_layers,
            activation=values.get("hidden_activation") or values.get("hidden_act") or "silu",
            layers=tuple(map(cls.from_config, config.per_layer_config)) if is_heterogeneous else (),
        )

    def at(self, layer: int) -> "ModelSizes":
        """Return the sizes at a layer."""
        return self.layers[layer] if self.layers else self
