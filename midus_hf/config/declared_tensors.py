"""Declarations of tensors: shape, role and initial values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

# Purpose of a tensor in a memory.
#
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


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution with mean zero and standard deviation `std`, cut off at two standard deviations."""

    std: float

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        # The inverse of the distribution function takes exactly one draw per element.
        tensor.uniform_(-_WITHIN_TWO, _WITHIN_TWO, generator=generator).erfinv_().mul_(self.std * math.sqrt(2))


# Share of a normal distribution within two standard deviations of the mean.
_WITHIN_TWO = math.erf(math.sqrt(2))


@dataclass(frozen=True)
class LateInitial:
    """Initial values from `make(*arguments)`, which is called only when a tensor is filled because the call takes long."""

    make: Callable[..., Initial]
    arguments: tuple[Any, ...]

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        self.make(*self.arguments).fill(tensor, generator)


ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class DeclaredTensor:
    """One tensor of a memory.

    Args:
        role: Purpose of the tensor, as `Role` lists them.
        initial: Values that the tensor starts with.
        dtype: Integer dtype of a buffer. Default: empty, the dtype of the model.
    """

    shape: tuple[int, ...]
    role: Role
    initial: Initial
    dtype: Literal["", "int64"] = ""
