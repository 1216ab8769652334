"""What a Trainer needs for tables of which a step reads few rows: gradients, updates and a norm of these rows alone."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from midus_hf.memory.protocols import ReadsFewRows
from midus_hf.training.row_adamw import RowAdamW, clip_rows, norm_of_rows

if TYPE_CHECKING:
    # What the mixin stands before, for all that it asks of itself.
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object


class TrainsTables(AnyTrainer):
    """Mixin for a `Trainer` of any kind.

    Args:
        sparse_values: Whether gradients of large value tables are sparse tensors of the rows that were read, and AdamW updates these
            rows alone, as `RowAdamW` does. Such gradients are clipped apart from all others. Default: false.
        kwargs: What the Trainer takes.

    Raises:
        ValueError: If `sparse_values` is set and no memory of the model has such a table, the optimizer is not AdamW, or several
            processes train together.
    """

    def __init__(self, *args: Any, sparse_values: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sparse_values = sparse_values
        if sparse_values:
            self._check_sparse_values()

    def _check_sparse_values(self) -> None:
        assert self.model is not None
        memories_of_few_rows(self.model)
        optimizer = OptimizerNames(self.args.optim).value
        if not optimizer.startswith("adamw_torch"):
            raise ValueError(f"sparse_values is true, and optim is {optimizer!r}; expected adamw_torch.")
        if self.args.world_size > 1 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "sparse_values is true, and several processes train or parameters are sharded, where gradients have to be dense; "
                "expected one process. Leave it out."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; gradients of tables are sparse, if they shall be, for as long as it runs."""
        assert self.model is not None
        memories = memories_of_few_rows(self.model) if self.sparse_values else []
        for memory in memories:
            memory.sparse_gradient = True
        try:
            return super().train(*args, **kwargs)
        finally:
            for memory in memories:
                memory.sparse_gradient = False

    def get_optimizer_class(self, optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
        """The class of the optimizer, in place of the one that the arguments name."""
        return RowAdamW if self.sparse_values else optimizer_class

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        tables = _tables_with_rows(model) if self.sparse_values else []
        if not tables:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        norm = self.accelerator.clip_grad_norm_(_others(model, tables), self.args.max_grad_norm)
        rows = clip_rows(tables, self.args.max_grad_norm)
        return torch.stack([torch.as_tensor(norm, device=rows.device), rows]).norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        tables = _tables_with_rows(model) if self.sparse_values and grad_norm is None else []
        if tables:
            norm = self.accelerator.clip_grad_norm_(_others(model, tables), float("inf"))
            rows = norm_of_rows(table.grad for table in tables if table.grad is not None)
            grad_norm = torch.stack([torch.as_tensor(norm, device=rows.device), rows]).norm()
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]


def memories_of_few_rows(model: nn.Module) -> list[ReadsFewRows]:
    """The memories of a model that read few rows of a large table.

    Raises:
        ValueError: If there is none.
    """
    memories: list[ReadsFewRows] = [module for module in model.modules() if isinstance(module, ReadsFewRows)]
    if not memories:
        raise ValueError(
            "sparse_values is true, but no memory of this model reads few rows of a large table; expected one of type ultramem. "
            "Leave it out."
        )
    return memories


def _tables_with_rows(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None and parameter.grad.is_sparse]


def _others(model: nn.Module, tables: list[nn.Parameter]) -> list[nn.Parameter]:
    taken = set(map(id, tables))
    return [parameter for parameter in model.parameters() if id(parameter) not in taken]
