"""Values that each head has expanded, kept while nothing changes them (MIDUS, appendix C.2)."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

_enabled = True


@contextlib.contextmanager
def without_value_cache() -> Iterator[None]:
    """Transform what is gathered, as training does, wherever a cache would be used within.

    Both ways compute the same up to rounding; this gives the very bits of a pass with gradients, or of a compiled one.
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


class ValueCache:
    """A tensor derived from parameters, made on demand for inference.

    It is kept only where its parameters cannot change unnoticed: in a module in eval mode, without gradients, outside a
    compiled graph. A change in place is seen by the parameters' version counters, unless it is made through `.data`;
    another tensor in their place by its address, which stays taken since the cache holds what it was derived from. It is
    dropped as soon as the module trains, and neither copied nor saved with it.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[torch.Tensor, int]] = []
        self._derived: torch.Tensor | None = None

    def get(
        self,
        module: nn.Module,
        parameters: tuple[torch.Tensor, ...],
        derive: Callable[..., torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """The derived tensor, or None where it must not be kept.

        Args:
            module: Whose parameters they are.
            parameters: What it is derived from.
            derive: Makes it from them, as they are cast to `dtype`.
            dtype: What is computed in; a tensor is kept for one dtype at a time.
        """
        if torch.compiler.is_compiling() or (parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # a graph would go on reading a tensor that was dropped meanwhile
        if (
            not _enabled
            or module.training
            or torch.is_grad_enabled()
            or not all(_is_stable(module, p) for p in parameters)
        ):
            self.drop()
            return None
        kept = self._derived is not None and self._derived.dtype == dtype
        if not (kept and all(map(_is_unchanged, self._sources, parameters))):
            self.drop()
            self._derived = derive(*(parameter.to(dtype) for parameter in parameters))
            self._sources = [(p.detach(), p._version) for p in parameters]
        return self._derived

    def drop(self) -> None:
        """Forget the tensor."""
        self._sources, self._derived = [], None

    @property
    def is_filled(self) -> bool:
        """Whether a tensor is kept."""
        return self._derived is not None

    @property
    def kept(self) -> list[torch.Tensor]:
        """What is kept, to be counted."""
        return [] if self._derived is None else [self._derived]

    def __getstate__(self) -> dict:
        return {"_sources": [], "_derived": None}


def _is_unchanged(source: tuple[torch.Tensor, int], parameter: torch.Tensor) -> bool:
    """Whether a parameter is, and holds, what it did when `source` was taken from it."""
    tensor, version = source
    place = (tensor.data_ptr(), tensor.dtype, tensor.device, version)
    return place == (parameter.data_ptr(), parameter.dtype, parameter.device, parameter._version)


def _is_stable(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether the parameter is a tensor of this process that stays where it is between forward passes."""
    plain = type(parameter) is nn.Parameter and parameter.device.type != "meta"
    return plain and not parameter.is_inference() and not hasattr(module, "_hf_hook")
