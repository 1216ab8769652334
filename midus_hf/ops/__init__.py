"""Functions on tensors. One op per file; the reference body in it is the contract that the faster ones must meet."""

from midus_hf.ops.backend import OpChoices, op_choices
from midus_hf.ops.flat_key import flat_key_topk
from midus_hf.ops.headwise_memory import expand_values, headwise_memory
from midus_hf.ops.product_key import product_key_topk
from midus_hf.ops.weighted_gather import weighted_gather

__all__ = [
    "OpChoices",
    "expand_values",
    "flat_key_topk",
    "headwise_memory",
    "op_choices",
    "product_key_topk",
    "weighted_gather",
]
