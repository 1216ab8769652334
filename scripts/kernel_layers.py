"""Layers of the kernel package, which replace the `forward` of a module that has their tensors as attributes.

A layer has no state, as Hugging Face's `kernels` demands: `kernelize` binds the `forward` to the module that is replaced.
`scripts/build_kernels.py` copies this file.
"""

import torch

from midus_hf.ops import headwise_memory, product_key_topk


class HeadwiseMemory(torch.nn.Module):
    """The forward pass of a memory per head, on a module with these attributes.

    Args:
        row_keys: Sub-keys, `[H, n, d / 2]`.
        column_keys: Sub-keys, `[H, n, d / 2]`.
        value_bank: Values, `[n * n, v]`; or a bank per head, `[H, n * n, v]`.
        value_transform: Transforms of each head, `[H, v, v]`; or None.
        k: Slots retrieved per head.
    """

    has_backward = True
    can_torch_compile = True

    row_keys: torch.Tensor
    column_keys: torch.Tensor
    value_bank: torch.Tensor
    value_transform: torch.Tensor | None
    k: int

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Return the output of each head, `[..., H, v]`, for its query, `[..., H, d]`."""
        return headwise_memory(
            query,
            self.row_keys,
            self.column_keys,
            self.value_bank,
            self.value_transform,
            self.k,
        )


class ProductKeys(torch.nn.Module):
    """The selection of product keys, on a module with these attributes.

    Args:
        row_keys: Sub-keys, `[H, n, d / 2]`.
        column_keys: Sub-keys, `[H, n, d / 2]`.
        k: Slots selected per head.
    """

    has_backward = True
    can_torch_compile = True

    row_keys: torch.Tensor
    column_keys: torch.Tensor
    k: int

    def forward(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and slots, both `[..., H, k]`, for the query of each head, `[..., H, d]`."""
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)
