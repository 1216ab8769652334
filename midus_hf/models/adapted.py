"""A family's attention or feed-forward network, with what memories change inside it for one forward pass."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Given what a projection reads and what it gives, what it shall give instead."""


class HeadReader(NamedTuple):
    """What a memory makes of what heads give.

    Args:
        read: Given queries `[B, H, T, d]`, keys and values `[B, K, S, d]`, rotated and from the cache, and what the heads give
            `[B, T, H, d]`, what they shall give instead.
        wants_unrotated: Whether it gets queries without their rotation as well, `[B, H, T, d]`, as `unrotated`, and by what scores
            are multiplied, as `scaling`.
    """

    read: Callable[..., torch.Tensor]
    wants_unrotated: bool


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
        return self.family_class.forward(_View(self, self._replaced_projections(adapters)), *args, **kwargs)

    def _replaced_projections(self, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
        return {
            PROJECTION_NAMES[role]: _adapted(getattr(self, PROJECTION_NAMES[role]), adapter)
            for role, adapter in adapters.items()
        }


class HostAttention(Adapted):
    """Mixin for a family's attention in a layer that hosts memory: a class of its own, which may lack its output projection."""

    def forward(
        self,
        *args: Any,
        adapters: Mapping[str, Adapter] | None = None,
        readers: Sequence[HeadReader] = (),
        **kwargs: Any,
    ) -> Any:
        """As the family's forward.

        Args:
            args: What the family's forward takes.
            adapters: What projections give instead, by their role. Default: nothing is changed.
            readers: What heads read beside the sequence, one after another. Default: nothing.
            kwargs: What the family's forward takes.
        """
        if not readers:
            return super().forward(*args, adapters=adapters, **kwargs)
        # The families look their attention function up in the config and hand it every keyword argument they do not know.
        replaced = {"config": _View(self.config, {"_attn_implementation": _WITH_READERS}), "own_config": self.config}
        view = _View(self, {**replaced, **self._replaced_projections(adapters or {})})
        rotation = kwargs.get("position_embeddings")
        return self.family_class.forward(view, *args, memory_readers=readers, memory_rotation=rotation, **kwargs)

    def drop_output_projection(self) -> None:
        """Give the heads' outputs side by side."""
        del self.o_proj
        # A function, not an `nn.Identity`: a LoRA on every `o_proj` would find the module and refuse it.
        self.o_proj = _unchanged


_WITH_READERS = f"with_readers_{__name__.replace('.', '_')}"
"""A name of its own for each copy of this code that a checkpoint brings."""


def _attend_with_readers(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    memory_readers: Sequence[HeadReader],
    memory_rotation: tuple[torch.Tensor, torch.Tensor] | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function, and what memories make of its output."""
    eager = sys.modules[module.family_class.__module__].eager_attention_forward
    own = ALL_ATTENTION_FUNCTIONS.get_interface(module.own_config._attn_implementation, eager)
    output, weights = own(module, query, key, value, attention_mask, **kwargs)  # [B, T, H, d]
    for reader in memory_readers:
        extra: dict[str, Any] = {}
        if reader.wants_unrotated:
            extra = {"unrotated": _unrotated(query, memory_rotation), "scaling": module.scaling}
        output = reader.read(query, key, value, output, **extra)
    return output, weights


def _unrotated(query: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Queries `[B, H, T, d]` as they were before their rotation, which scaled rotary embeddings make longer as well."""
    assert rotation is not None, "layers are called with position_embeddings"
    cos, sin = (
        part.unsqueeze(1).to(torch.promote_types(query.dtype, torch.float32)) for part in rotation
    )  # [B, 1, T, d]
    wide = query.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return ((wide * cos - turned * sin) / (cos.square() + sin.square())).to(query.dtype)


ALL_ATTENTION_FUNCTIONS.register(_WITH_READERS, _attend_with_readers)


def _adapted(projection: Callable[[torch.Tensor], torch.Tensor], adapter: Adapter) -> Callable[..., torch.Tensor]:
    def project(inputs: torch.Tensor) -> torch.Tensor:
        return adapter(inputs, projection(inputs))

    return project


def _unchanged(heads_output: torch.Tensor) -> torch.Tensor:
    return heads_output
