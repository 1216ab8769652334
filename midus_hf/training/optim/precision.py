"""Dtypes in which a model trains, and the cast back to the dtypes of its checkpoint."""

import torch
from transformers import PreTrainedModel

from midus_hf.memory.declared_module import DeclaredModule


def hold_for_training(model: PreTrainedModel, bf16: bool) -> dict[str, torch.dtype]:
    """Cast every parameter to the dtype in which it is held while training.

    Without `bf16`, everything is held in float32. With `bf16`, where autocast computes in bfloat16, parameters that
    train are held in float32, since bfloat16 would lose most updates of a small rate to rounding; frozen parameters
    keep their dtype. Running statistics of memories are held in float32 for the same reason.

    Args:
        model: A model with `requires_grad` set.
        bf16: Whether training computes in bfloat16.

    Returns:
        The previous dtypes, by name of the parameter or buffer, for `restore_dtypes`.
    """
    dtypes = {}
    for name, parameter in model.named_parameters():
        dtypes[name] = parameter.dtype
        if not bf16 or parameter.requires_grad:
            parameter.data = parameter.data.float()
    for name, buffer in _memory_buffers(model):
        dtypes[name] = buffer.dtype
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return dtypes


def restore_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast everything back to the dtype that it had before `hold_for_training`. For frozen tensors this is exact.

    Args:
        model: The model after training.
        dtypes: Dtypes by name, from `hold_for_training`.
    """
    for name, tensor in (*model.named_parameters(), *_memory_buffers(model)):
        tensor.data = tensor.data.to(dtypes[name])


def _memory_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of memories with their full names."""
    return [
        (f"{prefix}.{name}", buffer)
        for prefix, module in model.named_modules()
        if isinstance(module, DeclaredModule)
        for name, buffer in module.named_buffers()
    ]
