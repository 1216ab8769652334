"""Tables that the layers of a memory share."""

import torch

from midus_hf.memory.declared_module import DeclaredModule


class MemoryTables(DeclaredModule):
    """Tables that several layers read, at the model: saved once, counted once, sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """The tables by name: whoever reads them asks here, so that the hooks of offloading and sharding have run."""
        return {name: self.declared_tensor(name) for name in self.declared}
