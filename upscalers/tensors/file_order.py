"""Order in which tensors are stored: embeddings first, then the layers, then the tensors that follow the layers."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from upscalers.architecture.layer_tensors import is_embedding


class Named(Protocol):
    """Anything that has the full name of a tensor."""

    @property
    def name(self) -> str:
        """Full name of the tensor."""


Tensor = TypeVar("Tensor", bound=Named)


def in_file_order(outer: Iterable[Tensor], layers: Iterable[Tensor]) -> list[Tensor]:
    """Put the tensors outside the layers around the tensors of the layers, in the order in which a model uses them.

    Args:
        outer: The tensors outside the layers.
        layers: The tensors of the layers, in order.
    """
    outer = list(outer)
    embeddings = [tensor for tensor in outer if is_embedding(tensor.name)]
    return [*embeddings, *layers, *(tensor for tensor in outer if not is_embedding(tensor.name))]
