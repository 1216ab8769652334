"""The dtypes in which a model trains, and the way back to those of its checkpoint."""

from typing import Literal

import torch
from transformers import PreTrainedModel


def hold_for_training(model: PreTrainedModel, precision: Literal["bf16", "fp32"]) -> dict[str, torch.dtype]:
    """Put every parameter into the dtype in which it is held while training.

    For `"fp32"` that is float32. For `"bf16"`, where autocast computes in bfloat16, what trains is held in float32,
    since bfloat16 would round most updates of a small rate away; what is frozen stays as it is.

    Args:
        model: With `requires_grad` set.
        precision: `"bf16"` or `"fp32"`.

    Returns:
        The dtypes before, by parameter name, for `restore_dtypes`.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if precision == "fp32" or parameter.requires_grad:
            parameter.data = parameter.data.float()
    return dtypes


def restore_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast every parameter back to what `hold_for_training` found: exact for what was frozen.

    Args:
        model: The model after training.
        dtypes: What `hold_for_training` returned for it.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
