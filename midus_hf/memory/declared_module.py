"""A module whose tensors are those that a declaration names."""

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import nn

from midus_hf.config.declared_tensors import DeclaredTensor, Role


class DeclaredModule(nn.Module):
    """A module with declared tensors: raw parameters and buffers, and linear layers where the name says `NAME.weight`.

    Args:
        declared: By name.
    """

    def __init__(self, declared: Mapping[str, DeclaredTensor]):
        super().__init__()
        self.declared = dict(declared)
        for name, tensor in self.declared.items():
            if name.endswith(".weight"):
                outputs, inputs = tensor.shape
                setattr(self, name.removesuffix(".weight"), nn.Linear(inputs, outputs, bias=False))
            elif tensor.role == "buffer":
                dtype = getattr(torch, tensor.dtype) if tensor.dtype else None
                self.register_buffer(name, torch.empty(tensor.shape, dtype=dtype))
            else:
                setattr(self, name, nn.Parameter(torch.empty(tensor.shape)))
        self.reset_parameters()

    def leave_out(self, name: str) -> None:
        """Do without a tensor that is declared."""
        del self.declared[name]
        delattr(self, name.removesuffix(".weight"))

    def names_of(self, *roles: Role) -> list[str]:
        """Names of the tensors that have one of the roles."""
        return [name for name, tensor in self.declared.items() if tensor.role in roles]

    def declared_tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer by the name that the declaration has for it."""
        return attrgetter(name)(self)

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer that no checkpoint has filled, of those that have values at all."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)):
                with torch.no_grad():
                    self.declared[name].initial.fill(tensor)
