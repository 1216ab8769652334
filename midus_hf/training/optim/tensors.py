"""Tensors of a model as they are held while it trains: their dtypes, and their sizes where they are cut."""

import torch
from transformers import PreTrainedModel

from midus_hf.memory.tables import DeclaredModule


def hold_for_training(model: PreTrainedModel, bf16: bool) -> dict[str, torch.dtype]:
    """Cast every parameter to the dtype in which it is held while training.

    Without `bf16`, everything is held in float32. With `bf16`, where autocast computes in bfloat16, parameters that
    train are held in float32, since bfloat16 would lose most updates of a small rate to rounding; frozen parameters
    keep their dtype. Running statistics of memories are held in float32 for the same reason.

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
    """Cast everything back to the dtype that it had before `hold_for_training`. For frozen tensors this is exact."""
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


def whole_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the parameter in all processes together."""
    return getattr(parameter, "ds_numel", parameter.numel())
