"""Gradients of large tables in the rows that a step read: when they are computed, and how they are clipped."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

# Optimizers of Transformers whose updates `RowAdamW` computes row by row.
_ROW_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def check_sparse_values(trainer: Any) -> None:
    """Check that a Trainer can take gradients of rows, or raise `ValueError`."""
    if not _row_readers(trainer.model):
        raise ValueError(
            "sparse_values is true, but no memory of this model reads few rows of a large table; expected one of type "
            "ultramem, chapters or ngram. Leave it out."
        )
    optimizer = OptimizerNames(trainer.args.optim).value
    if optimizer not in _ROW_OPTIMIZERS:
        raise ValueError(
            f"sparse_values is true, and optim is {optimizer!r}; expected {' or '.join(_ROW_OPTIMIZERS)}, whose updates a step "
            "makes in the rows that it read. Leave one of them out."
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError(
            "sparse_values is true, and the Trainer was given an optimizer, which would be replaced; expected none. Leave out "
            "optimizers and optimizer_cls_and_kwargs, or sparse_values."
        )
    if trainer.args.world_size > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "sparse_values is true, and several processes train, whose gradients must be dense; expected one process. Leave it out."
        )


@contextlib.contextmanager
def row_gradients(model: nn.Module) -> Iterator[None]:
    """Make gradients of large tables sparse tensors of the rows that were read, inside the context."""
    readers = _row_readers(model)
    for reader in readers:
        reader.sparse_gradient = True
    try:
        yield
    finally:
        for reader in readers:
            reader.sparse_gradient = False


def clip_rows(tables: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Coalesce the sparse gradients of tables, and scale them down to a joint norm of `max_norm`; return the norm before."""
    gradients = []
    for table in tables:
        assert table.grad is not None
        table.grad = table.grad.coalesce()
        gradients.append(table.grad.values())
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _row_readers(model: nn.Module) -> list[Any]:
    """Return what computes the gradients of the model's large tables."""
    return [module for module in model.modules() if hasattr(module, "sparse_gradient")]
