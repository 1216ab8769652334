"""Modules with declared tensors, and tables that the layers of a memory share."""

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import nn

from midus_hf.config.declared_tensors import DeclaredTensor, Role


class DeclaredModule(nn.Module):
    """Module with declared tensors: parameters and buffers, and a linear layer `NAME` for each tensor called `NAME.weight`.

    Args:
        declared: Declaration of each tensor, by the tensor's name.
    """

    def __init__(self, declared: Mapping[str, DeclaredTensor]):
        super().__init__()
        self.declared = dict(declared)
        for name, tensor in self.declared.items():
            if name.endswith(".weight"):
                outputs, inputs = tensor.shape
                # Unlike `setattr`, this refuses names of what a module has already.
                self.add_module(name.removesuffix(".weight"), nn.Linear(inputs, outputs, bias=False))
            elif tensor.role == "buffer":
                dtype = getattr(torch, tensor.dtype) if tensor.dtype else None
                self.register_buffer(name, torch.empty(tensor.shape, dtype=dtype))
            else:
                setattr(self, name, nn.Parameter(torch.empty(tensor.shape)))
        self.reset_parameters()

    def leave_out(self, name: str) -> None:
        """Remove a declared tensor from the module."""
        del self.declared[name]
        delattr(self, name.removesuffix(".weight"))

    def names_of(self, *roles: Role) -> list[str]:
        """Return the names of the tensors that have one of the roles."""
        return [name for name, tensor in self.declared.items() if tensor.role in roles]

    def declared_tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer by its declared name."""
        return attrgetter(name)(self)

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer that no checkpoint has filled, except on the meta device."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)):
                with torch.no_grad():
                    self.declared[name].initial.fill(tensor)


class MemoryTables(DeclaredModule):
    """Tables that several layers read. The model holds them, so they are saved, counted and sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the tables by name; tables are read by this call, so that the hooks of offloading and sharding run first."""
        return {name: self.declared_tensor(name) for name in self.declared}
