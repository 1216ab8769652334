"""The dtypes in which a model trains, and the way back to those of its checkpoint."""

import torch
from transformers import PreTrainedModel

from midus_hf.memory.declared_module import DeclaredModule


def hold_for_training(model: PreTrainedModel, bf16: bool) -> dict[str, torch.dtype]:
    """Put every parameter into the dtype in which it is held while training.

    Without `bf16` that is float32. With `bf16`, where autocast computes in bfloat16, what trains is held in float32,
    since bfloat16 would round most updates of a small rate away; what is frozen stays as it is. Running statistics of
    memories are held in float32 for the same reason.

    Args:
        model: With `requires_grad` set.
        bf16: Whether training computes in bfloat16.

    Returns:
        The dtypes before, by name of the parameter or buffer, for `restore_dtypes`.
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
    """Cast everything back to what `hold_for_training` found: exact for what was frozen.

    Args:
        model: The model after training.
        dtypes: What `hold_for_training` returned for it.
    """
    for name, tensor in (*model.named_parameters(), *_memory_buffers(model)):
        tensor.data = tensor.data.to(dtypes[name])


def _memory_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """The buffers of memories, by full name."""
    return [
        (f"{prefix}.{name}", buffer)
        for prefix, module in model.named_modules()
        if isinstance(module, DeclaredModule)
        for name, buffer in module.named_buffers()
    ]
