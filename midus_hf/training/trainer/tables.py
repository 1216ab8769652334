"""Tables of which a step reads few rows: gradients and updates of these rows alone, and columns split over processes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.training_args import OptimizerNames

from midus_hf.memory.protocols import GivesRowGradients, ReadsFewRows
from midus_hf.training.optim.row_adamw import RowAdamW, clip_rows
from midus_hf.training.optim.table_columns import TableColumns


class Tables:
    """Support of a Trainer of any kind for large value tables.

    Args:
        trainer: A Trainer that has its model and its accelerator.
        sparse_values: Whether gradients of large value tables are sparse tensors of the rows that were read, and AdamW
            updates only these rows, as `RowAdamW` does. These gradients are clipped separately from all others.
            Default: false.
        shard_values: Whether each of several processes holds and trains some columns of these tables, for the tokens of
            all processes. The model stays split: its evaluation needs all processes, and `save_model` saves it, with
            whole tables. Default: false.

    Raises:
        ValueError: If either option is set and no memory of the model has a table that it applies to. If
            `sparse_values` is set and the optimizer is not AdamW, parameters are sharded, or several processes train
            whole tables. If `shard_values` is set and other parameters are sharded, the model is compiled, or the
            columns do not divide over the processes.
    """

    def __init__(self, trainer: Any, sparse_values: bool = False, shard_values: bool = False):
        self._trainer, self.sparse_values = trainer, sparse_values
        # The tables whose columns processes share; None if each process has all columns.
        self.columns: TableColumns | None = None
        if shard_values:
            self._check_shard_values()
            if trainer.args.world_size > 1:
                # A separate group keeps its messages apart from the messages of gradients, which are sent at the same time.
                self.columns = TableColumns(trainer.model, dist.new_group())
        if sparse_values:
            self._check_sparse_values()

    def _check_sparse_values(self) -> None:
        check_reads_few_rows(self._trainer.model, "sparse_values")
        optimizer = OptimizerNames(self._trainer.args.optim).value
        if not optimizer.startswith("adamw_torch"):
            raise ValueError(f"sparse_values is true, and optim is {optimizer!r}; expected adamw_torch.")
        several = self._trainer.args.world_size > 1 and self.columns is None
        if several or self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled:
            raise ValueError(
                "sparse_values is true, and several processes train whole tables or parameters are sharded, where gradients have to "
                "be dense; expected one process, or shard_values. Leave it out."
            )

    def _check_shard_values(self) -> None:
        check_reads_few_rows(self._trainer.model, "shard_values")
        if self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled:
            raise ValueError(
                "shard_values is true, and FSDP or DeepSpeed shards all parameters; expected processes that hold whole models. "
                "Leave one of them out."
            )
        if self._trainer.args.torch_compile:
            raise ValueError(
                "shard_values is true, for which a model has to run uncompiled; leave it out, or torch_compile."
            )

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Make gradients of tables sparse inside the context, if `sparse_values` is set."""
        # If processes share columns, PyTorch averages the gradients of all other tables, and can average only dense gradients.
        shared_alone = self.columns is not None
        readers = _row_readers(self._trainer.model, shared_alone) if self.sparse_values else []
        for reader in readers:
            reader.sparse_gradient = True
        try:
            yield
        finally:
            for reader in readers:
                reader.sparse_gradient = False

    def optimizer_class(self, named: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
        """Return the class of the optimizer: `RowAdamW` for sparse gradients, otherwise `named`."""
        return RowAdamW if self.sparse_values else named

    def whole(self, optimizer: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tables, and an optimizer's moments, are whole in the first process.

        All processes enter the context.
        """
        return contextlib.nullcontext() if self.columns is None else self.columns.whole(optimizer)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which whole tables can be loaded; all processes enter it."""
        return contextlib.nullcontext() if self.columns is None else self.columns.loading()

    def cut_moments(self) -> None:
        """Reduce moments that were loaded for whole tables to the columns of this process."""
        if self.columns is not None:
            self.columns.cut_moments(self._trainer.optimizer)

    def clips_apart(self, model: nn.Module) -> bool:
        """Return whether the model has gradients that the Trainer cannot clip: of rows, of columns or of blocks."""
        return self.columns is not None or bool(self._trainer.blocks.banks) or bool(_with_rows(model))

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients of rows together, and all other gradients together; return the joint norm before clipping.

        The norm covers the gradients of all processes.
        """
        total: Callable[[torch.Tensor], torch.Tensor] = (
            (lambda norm: norm) if self.columns is None else self.columns.total_norm
        )
        tables = _with_rows(model)
        ids_with_rows = {id(table) for table in tables}
        split = {id(table) for table in self.columns.parameters.values()} if self.columns is not None else set()
        others: list[torch.Tensor] = [
            parameter for parameter in model.parameters() if id(parameter) not in ids_with_rows
        ]
        others += self._trainer.blocks.leaves()
        self._trainer.accelerator.unscale_gradients()
        gradients_of_columns = [
            parameter.grad for parameter in others if id(parameter) in split and parameter.grad is not None
        ]
        other_gradients = [
            parameter.grad for parameter in others if id(parameter) not in split and parameter.grad is not None
        ]
        norms = [nn.utils.get_total_norm(other_gradients)]
        if self.columns is not None:
            norms.append(total(nn.utils.get_total_norm(gradients_of_columns).to(self._trainer.args.device)))
        norm = torch.stack([part.to(self._trainer.args.device) for part in norms]).norm()
        nn.utils.clip_grads_with_norm_(others, max_norm, norm)
        if tables:
            norm_of_rows = clip_rows(tables, max_norm, total)
            norm = torch.stack([norm.to(norm_of_rows.device), norm_of_rows]).norm()
        return norm


def check_reads_few_rows(model: nn.Module, option: str) -> None:
    """Check that a memory of a model reads few rows of a large table.

    Args:
        model: A model with or without memories.
        option: Name of the option that needs the memory, `"sparse_values"` or `"shard_values"`.

    Raises:
        ValueError: If no memory of the model suits the option.
    """
    kinds: tuple[type, ...] = (ReadsFewRows, GivesRowGradients) if option == "sparse_values" else (ReadsFewRows,)
    if not any(isinstance(module, kinds) for module in model.modules()):
        types = "ultramem or chapters" if option == "sparse_values" else "ultramem"
        raise ValueError(
            f"{option} is true, but no memory of this model reads few rows of a large table; expected one of type {types}. "
            "Leave it out."
        )


def _row_readers(model: nn.Module, shared_alone: bool) -> list[GivesRowGradients]:
    """Return the modules that compute the gradients of the model's large tables.

    Args:
        model: A model with or without memories.
        shared_alone: Whether to leave out tables whose columns processes cannot share.
    """
    readers: list[GivesRowGradients] = [
        module.table_reading for module in model.modules() if isinstance(module, ReadsFewRows)
    ]
    return (
        readers
        if shared_alone
        else [*readers, *(module for module in model.modules() if isinstance(module, GivesRowGradients))]
    )


def _with_rows(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients are sparse tensors of rows."""
    return [parameter for parameter in model.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
