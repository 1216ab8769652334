"""Tables that the layers of a memory share."""

import torch

from midus_config.installed import INSTALLED
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.ops.chapters.rows import with_one_gradient


class LentTables(dict[str, torch.Tensor]):
    """The tables of one forward pass, by name."""

    def __init__(self, tables: dict[str, torch.Tensor]):
        super().__init__(tables)
        self._with_one_gradient: dict[str, torch.Tensor] = {}

    def with_one_gradient(self, name: str) -> torch.Tensor:
        """A table for layers whose gradients are of the rows that they read: these are added up before one dense gradient is made."""
        if name not in self._with_one_gradient:
            self._with_one_gradient[name] = with_one_gradient(self[name])
        return self._with_one_gradient[name]


class MemoryTables(DeclaredModule):
    """Tables that several layers read, at the model: saved once, counted once, sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """The tables by name: whoever reads them asks here, so that the hooks of offloading and sharding have run."""
        tables = {name: self.declared_tensor(name) for name in self.declared}
        return LentTables(tables) if INSTALLED and not torch.compiler.is_compiling() else tables
