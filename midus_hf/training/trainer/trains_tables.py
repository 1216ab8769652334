"""What a Trainer needs for tables of which a step reads few rows: gradients, updates and a norm of these rows alone, and columns
that are spread over processes."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.training_args import OptimizerNames

from midus_hf.memory.protocols import GivesRowGradients, ReadsFewRows
from midus_hf.training.optim.row_adamw import RowAdamW, clip_rows
from midus_hf.training.optim.table_columns import TableColumns
from midus_hf.training.trainer.trains_blocks import TrainsBlocks


class TrainsTables(TrainsBlocks):
    """Mixin for a `Trainer` of any kind, as `TrainsBlocks`, which it includes.

    Args:
        sparse_values: Whether gradients of large value tables are sparse tensors of the rows that were read, and AdamW updates these
            rows alone, as `RowAdamW` does. Such gradients are clipped apart from all others. Default: false.
        shard_values: Whether each of several processes holds and trains some columns of these tables, for the tokens of all. The
            model stays so: its evaluation needs all processes, and it is saved by `save_model`. What is saved are whole tables.
            Default: false.
        args: What the Trainer takes.
        kwargs: What the Trainer takes.

    Raises:
        ValueError: If either is set and no memory of the model has such a table. If `sparse_values` is set and the optimizer is not
            AdamW, or several processes train together whose tables are whole. If `shard_values` is set and other parameters are
            sharded, the model is compiled, or the columns do not divide over the processes.
    """

    def __init__(self, *args: Any, sparse_values: bool = False, shard_values: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sparse_values = sparse_values
        self.columns: TableColumns | None = None
        """The tables that processes share; None where each process has all columns."""
        if shard_values:
            self._check_shard_values()
            if self.args.world_size > 1:
                assert isinstance(self.model, nn.Module)
                # A group of its own: its messages are never mistaken for those of gradients, which are sent meanwhile.
                self.columns = TableColumns(self.model, dist.new_group())
        if sparse_values:
            self._check_sparse_values()

    def _check_sparse_values(self) -> None:
        assert self.model is not None
        check_reads_few_rows(self.model, "sparse_values")
        optimizer = OptimizerNames(self.args.optim).value
        if not optimizer.startswith("adamw_torch"):
            raise ValueError(f"sparse_values is true, and optim is {optimizer!r}; expected adamw_torch.")
        several = self.args.world_size > 1 and self.columns is None
        if several or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "sparse_values is true, and several processes train whole tables or parameters are sharded, where gradients have to "
                "be dense; expected one process, or shard_values. Leave it out."
            )

    def _check_shard_values(self) -> None:
        assert self.model is not None
        check_reads_few_rows(self.model, "shard_values")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "shard_values is true, and FSDP or DeepSpeed shards all parameters; expected processes that hold whole models. "
                "Leave one of them out."
            )
        if self.args.torch_compile:
            raise ValueError(
                "shard_values is true, for which a model has to run uncompiled; leave it out, or torch_compile."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; gradients of tables are sparse, if they shall be, for as long as it runs."""
        assert self.model is not None
        # Where processes share columns, tables that they do not share are averaged by PyTorch, which takes dense gradients alone.
        readers = _row_readers(self.model, shared_alone=self.columns is not None) if self.sparse_values else []
        for reader in readers:
            reader.sparse_gradient = True
        try:
            return super().train(*args, **kwargs)
        finally:
            for reader in readers:
                reader.sparse_gradient = False

    def get_optimizer_class(self, optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
        """The class of the optimizer, in place of the one that the arguments name."""
        return RowAdamW if self.sparse_values else optimizer_class

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`, with whole tables; all processes call it."""
        with self._whole_tables():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        with self._whole_tables(self.optimizer):
            super()._save_checkpoint(model, trial)

    def _whole_tables(self, optimizer: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.columns is None else self.columns.whole(optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with contextlib.nullcontext() if self.columns is None else self.columns.loading():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with contextlib.nullcontext() if self.columns is None else self.columns.loading():
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.columns is not None:
            assert self.optimizer is not None
            self.columns.cut_moments(self.optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self._clips_apart(model):
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self._clip_apart(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._clips_apart(model):
            grad_norm = self._clip_apart(model, float("inf"))
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _clips_apart(self, model: nn.Module) -> bool:
        """Whether there are gradients that the Trainer cannot clip: of rows, of columns, of blocks."""
        return self.columns is not None or bool(self.trained_banks) or bool(_with_rows(model))

    def _clip_apart(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients of rows, and all others together; their norm before that, over all processes."""
        total: Callable[[torch.Tensor], torch.Tensor] = (
            (lambda norm: norm) if self.columns is None else self.columns.total_norm
        )
        tables = _with_rows(model)
        taken = {id(table) for table in tables}
        split = {id(table) for table in self.columns.parameters.values()} if self.columns is not None else set()
        others: list[torch.Tensor] = [parameter for parameter in model.parameters() if id(parameter) not in taken]
        others += self.block_leaves()
        self.accelerator.unscale_gradients()
        here = [parameter.grad for parameter in others if id(parameter) in split and parameter.grad is not None]
        everywhere = [
            parameter.grad for parameter in others if id(parameter) not in split and parameter.grad is not None
        ]
        norms = [nn.utils.get_total_norm(everywhere)]
        if self.columns is not None:
            norms.append(total(nn.utils.get_total_norm(here).to(self.args.device)))
        norm = torch.stack([part.to(self.args.device) for part in norms]).norm()
        nn.utils.clip_grads_with_norm_(others, max_norm, norm)
        if tables:
            rows = clip_rows(tables, max_norm, total)
            norm = torch.stack([norm.to(rows.device), rows]).norm()
        return norm


def check_reads_few_rows(model: nn.Module, option: str) -> None:
    """See that a memory of a model reads few rows of a large table.

    Args:
        model: Which may have none.
        option: Who asks for them, by name.

    Raises:
        ValueError: If there is none.
    """
    kinds: tuple[type, ...] = (ReadsFewRows, GivesRowGradients) if option == "sparse_values" else (ReadsFewRows,)
    if not any(isinstance(module, kinds) for module in model.modules()):
        types = "ultramem or chapters" if option == "sparse_values" else "ultramem"
        raise ValueError(
            f"{option} is true, but no memory of this model reads few rows of a large table; expected one of type {types}. "
            "Leave it out."
        )


def _row_readers(model: nn.Module, shared_alone: bool) -> list[GivesRowGradients]:
    """Return what gives the large tables of a model their gradients.

    Args:
        model: The model.
        shared_alone: Whether to leave out tables whose columns processes cannot share.
    """
    readers: list[GivesRowGradients] = [
        module.table_reading for module in model.modules() if isinstance(module, ReadsFewRows)
    ]
    return (
        readers
        if shared_alone
        else [*readers, *(one for one in model.modules() if isinstance(one, GivesRowGradients))]
    )


def _with_rows(model: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are of rows."""
    return [parameter for parameter in model.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
