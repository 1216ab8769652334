"""Tensors of a base that are not stored in the form in which they are read: they are computed at each read."""

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upscalers.checkpoint.safetensors_format import INTEGER_NAMES, TORCH_NAMES, StoredTensor

if TYPE_CHECKING:
    import torch

FP8_NAMES = {"F8_E4M3": "float8_e4m3fn"}


@dataclass(frozen=True)
class ComputedTensor(StoredTensor):
    """A tensor that is computed from a stored `weight`; dtype and shape are those of the result."""

    weight: StoredTensor | None = None

    @property
    def in_file(self) -> StoredTensor:
        assert self.weight is not None
        return self.weight

    @abstractmethod
    def read(self) -> "torch.Tensor":
        """Compute the tensor."""


def read_tensor(stored: StoredTensor, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Read or compute a tensor, and cast it unless it is stored as integers; by default it keeps its dtype."""
    import torch

    if isinstance(stored, ComputedTensor):
        computed = stored.read()
        return computed if dtype is None else computed.to(dtype)
    assert stored.file is not None
    tensor = torch.empty(stored.shape, dtype=getattr(torch, (TORCH_NAMES | INTEGER_NAMES | FP8_NAMES)[stored.dtype]))
    unread, position = tensor.view(-1).view(torch.uint8).numpy().data, stored.start
    with stored.file.open("rb", buffering=0) as file:
        while unread:
            num_bytes = os.preadv(file.fileno(), [unread], position)
            if not num_bytes:
                raise OSError(f"{stored.file.name} ended {len(unread)} bytes early")
            unread, position = unread[num_bytes:], position + num_bytes
    return tensor if dtype is None or stored.dtype in INTEGER_NAMES else tensor.to(dtype)
