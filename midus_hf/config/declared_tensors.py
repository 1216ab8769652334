"""Tensors as declarations name them: shape, role, and what they start as."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Role = Literal["key", "value", "transform", "projection", "norm", "gate", "router", "buffer"]
"""What a tensor of a memory is.

`key`: compared with queries. `value`: what is retrieved, a row for each slot in the dimension before the last. `transform`:
makes values from others. `projection`: any other linear map. `norm`: gain or bias of a norm. `gate`: scales what a memory
returns. `router`: chooses parts of a memory. `buffer`: no parameter.
"""


class Initial(Protocol):
    """What a tensor starts as."""

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        """Fill `tensor` in place; the same generator, the same bytes."""


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.fill_(self.value)


@dataclass(frozen=True)
class Uniform:
    """Uniform between `-bound` and `bound`."""

    bound: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Normal:
    """Normal with mean zero and standard deviation `std`."""

    std: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        tensor.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with mean zero and standard deviation `std`, cut off at two standard deviations."""

    std: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        # By the inverse of its distribution function, so that every number takes one draw.
        tensor.uniform_(-_WITHIN_TWO, _WITHIN_TWO, generator=generator).erfinv_().mul_(self.std * math.sqrt(2))


_WITHIN_TWO = math.erf(math.sqrt(2))
"""Share of a normal distribution that lies within two standard deviations."""


@dataclass(frozen=True)
class WhenFilled:
    """What `make` returns for `arguments`, asked for when a tensor is filled: for an initial that takes long to work out."""

    make: Callable[..., Initial]
    arguments: tuple[Any, ...]

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        self.make(*self.arguments).fill(tensor, generator)


ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class DeclaredTensor:
    """One tensor of a memory.

    Args:
        shape: Its shape.
        role: What it is.
        initial: What it starts as.
        dtype: Of a buffer that is stored as integers. Default: that of the model.
    """

    shape: tuple[int, ...]
    role: Role
    initial: Initial
    dtype: Literal["", "int8", "uint8"] = ""
