"""Functions on tensors. One op a file; the PyTorch reference in it is the contract that a faster kernel must meet."""

from midus_hf.ops.headwise_memory import headwise_memory
from midus_hf.ops.product_key import product_key_topk

__all__ = ["headwise_memory", "product_key_topk"]
