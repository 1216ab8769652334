"""A family's attention or feed-forward network, with what memories change inside it for one forward pass."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Given what a projection reads and what it gives, what it shall give instead."""

PROJECTION_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output_projection": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""What the families call the projections of a layer, by their role."""


class _View:
    """A module with some attributes replaced, for the length of one call; the module itself stays as it is."""

    def __init__(self, module: nn.Module, replaced: dict[str, Any]):
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["_replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_module"], name)


class Adapted:
    """Mixin for a family's attention or feed-forward network, whose projections a call may adapt.

    The family's own forward runs on a view of the module in which projections are replaced, so nothing of it is written a
    second time, and nothing of a call is left on the module.
    """

    family_class: ClassVar[type[nn.Module]]
    """The family's class, whose forward runs."""

    def forward(self, *args: Any, adapters: Mapping[str, Adapter] | None = None, **kwargs: Any) -> Any:
        """As the family's forward.

        Args:
            args: What the family's forward takes.
            adapters: What projections give instead, by their role. Default: nothing is changed.
            kwargs: What the family's forward takes.
        """
        if not adapters:
            return self.family_class.forward(self, *args, **kwargs)
        replaced = {
            PROJECTION_NAMES[role]: _adapted(getattr(self, PROJECTION_NAMES[role]), adapter)
            for role, adapter in adapters.items()
        }
        return self.family_class.forward(_View(self, replaced), *args, **kwargs)


class HostAttention(Adapted):
    """Mixin for a family's attention in a layer that hosts memory: a class of its own, which may lack its output projection."""

    def drop_output_projection(self) -> None:
        """Give the heads' outputs side by side."""
        del self.o_proj
        # A function, not an `nn.Identity`: a LoRA on every `o_proj` would find the module and refuse it.
        self.o_proj = _unchanged


def _adapted(projection: Callable[[torch.Tensor], torch.Tensor], adapter: Adapter) -> Callable[..., torch.Tensor]:
    def project(inputs: torch.Tensor) -> torch.Tensor:
        return adapter(inputs, projection(inputs))

    return project


def _unchanged(heads_output: torch.Tensor) -> torch.Tensor:
    return heads_output
