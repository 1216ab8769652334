"""Functions on tensors, one folder or file per op; its `reference_OP`, plain PyTorch, is the contract for faster ones."""

from midus_hf.ops.dispatch.calling import OpChoices, op_choices
from midus_hf.ops.gather.op import weighted_gather
from midus_hf.ops.midus_hml.op import expand_values, headwise_memory
from midus_hf.ops.product_key.op import flat_key_topk, product_key_topk

__all__ = [
    "OpChoices",
    "expand_values",
    "flat_key_topk",
    "headwise_memory",
    "op_choices",
    "product_key_topk",
    "weighted_gather",
]
