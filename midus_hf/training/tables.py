"""Tables of which a step reads few rows: gradients and updates of these rows alone, and columns split over processes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.training_args import OptimizerNames

from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.protocols import GivesRowGradients, HostsTables, ReadsFewRows
from midus_hf.memory.tables import TableReading
from midus_hf.ops.gather.column_shards import sharded_gathered_products, sharded_parted_gather, sharded_weighted_gather
from midus_hf.training.optim.row_adamw import clip_rows

# Optimizers of Transformers whose updates `RowAdamW` computes row by row.
_ROW_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")

# Numbers that all processes together send in one message when a table is gathered.
_NUMBERS_AT_ONCE = 1 << 24


class ShardedReading(TableReading):
    """Sums of rows of a table, and products with rows, if each process holds some of the columns.

    Args:
        sparse_gradient: Whether gradients of tables are sparse tensors of the rows that were read.
        processes: The `ProcessGroup` whose processes share the columns.
    """

    def __init__(self, sparse_gradient: bool, processes: Any):
        super().__init__(sparse_gradient)
        self._processes = processes

    def sums(self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return sharded_weighted_gather(bank, slots, weights, self._processes, sparse_gradient=self.sparse_gradient)

    def sums_by_part(
        self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor, num_parts: int
    ) -> torch.Tensor:
        return sharded_parted_gather(
            bank, slots, weights, parts, num_parts, self._processes, sparse_gradient=self.sparse_gradient
        )

    def products(self, vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return sharded_gathered_products(vectors, bank, slots, self._processes, sparse_gradient=self.sparse_gradient)


class TableColumns:
    """Value tables of memories that read few rows, of which each process keeps a contiguous stretch of the columns.

    Gradients, moments and the optimizer's time cover only this stretch. A gradient is divided by the number of
    processes, as `DistributedDataParallel` does with all other gradients. `DistributedDataParallel` must ignore these
    parameters, so this class lists them in the attribute of the model that it reads. The model can be saved only inside
    `whole`.

    Args:
        model: A model that is the same in every process. The constructor cuts its tables.
        group: The processes; the columns are split in the order of the ranks.

    Raises:
        ValueError: If a table's columns do not divide over the processes. Nothing is cut then.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        self.group = group
        readers: list[ReadsFewRows] = [module for module in model.modules() if isinstance(module, ReadsFewRows)]
        self.parameters = tables_of_values(model)
        processes = group.size()
        for name, parameter in self.parameters.items():
            if parameter.shape[-1] % processes:
                raise ValueError(
                    f"shard_values is true, and {name} has {parameter.shape[-1]} columns for {processes} processes; expected a "
                    "number of processes that divides them."
                )
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self._may_be_saved = False
        for parameter in self.parameters.values():
            parameter.data = self.stretch_of(parameter.data)
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / processes)
        for reader in readers:
            reader.table_reading = ShardedReading(reader.table_reading.sparse_gradient, group)
        ids = set(map(id, self.parameters.values()))
        for module in model.modules():
            if any(id(parameter) in ids for parameter in module.parameters(recurse=False)):
                module.register_state_dict_pre_hook(self._check_saving)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self.parameters))

    def stretch_of(self, table: torch.Tensor) -> torch.Tensor:
        """Return a copy of this process's columns, `[R, v / P]`, of a whole table `[R, v]`."""
        return table.chunk(self.group.size(), dim=-1)[self.group.rank()].clone()

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Gather whole tables, and an optimizer's whole moments, in the first process's host memory.

        All processes enter the context; the others keep their stretches. A nested context changes nothing.
        """
        if self._may_be_saved:
            yield
            return
        replaced: list[tuple[nn.Parameter, torch.Tensor]] = []
        moments: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        state: Any = {} if optimizer is None else optimizer.state
        for parameter in self.parameters.values():
            replaced.append((parameter, parameter.data))
            for key, value in state.get(parameter, {}).items():
                if torch.is_tensor(value) and _is_of_rows(value, parameter.shape):
                    moments.append((state[parameter], key, value))
        for parameter, stretch in replaced:
            parameter.data = self._gathered(stretch)
        for parameter_state, key, stretch in moments:
            parameter_state[key] = self._gathered(stretch)
        self._may_be_saved = True
        try:
            yield
        finally:
            self._may_be_saved = False
            for parameter, stretch in replaced:
                parameter.data = stretch
            for parameter_state, key, stretch in moments:
                parameter_state[key] = stretch

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let every process load whole tables inside the context, and afterwards keep only its columns."""
        stretches = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = torch.empty(self.shapes[name], dtype=parameter.dtype)
        try:
            yield
        except BaseException:
            for name, parameter in self.parameters.items():
                parameter.data = stretches[name]
            raise
        for name, parameter in self.parameters.items():
            parameter.data = stretches[name].copy_(self.stretch_of(parameter.data))

    def cut_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce moments that were loaded whole to this process's columns."""
        state: Any = optimizer.state
        for name, parameter in self.parameters.items():
            for key, value in state.get(parameter, {}).items():
                if torch.is_tensor(value) and _is_of_rows(value, self.shapes[name]):
                    state[parameter][key] = self.stretch_of(value)

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm over all processes, a scalar, from the norm in this process."""
        square = norm.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _gathered(self, stretch: torch.Tensor) -> torch.Tensor:
        """Return the whole table in the first process's host memory, gathered in parts; elsewhere return the stretch."""
        first, processes = self.group.rank() == 0, self.group.size()
        width = stretch.shape[-1] * processes
        whole = torch.empty(len(stretch), width, dtype=stretch.dtype) if first else stretch
        destination = dist.get_global_rank(self.group, 0)
        rows_at_once = max(1, _NUMBERS_AT_ONCE // width)
        for start in range(0, len(stretch), rows_at_once):
            rows = stretch[start : start + rows_at_once].contiguous()
            parts = [torch.empty_like(rows) for _ in range(processes)] if first else None
            dist.gather(rows, parts, destination, group=self.group)
            if parts is not None:
                whole[start : start + len(rows)] = torch.cat(parts, dim=-1).to(whole.device)
        return whole

    def _check_saving(self, *_: Any) -> None:
        if not self._may_be_saved:
            raise ValueError(
                f"tables of values are split over {self.group.size()} processes, and a state dict would hold a part of them; save by "
                "Trainer.save_model, which all processes call."
            )


def tables_of_values(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the value tables of memories that read few rows, by parameter name; layers may share these tables."""
    ids_read = {
        id(table) for module in model.modules() if isinstance(module, ReadsFewRows) for table in module.parameters()
    }
    for host in model.modules():
        if isinstance(host, HostsTables):
            for memory, tables in host.table_readers():
                ids_read |= {id(table) for table in tables.values()} if isinstance(memory, ReadsFewRows) else set()
    ids_of_values = {
        id(module.declared_tensor(name))
        for module in model.modules()
        if isinstance(module, DeclaredModule)
        for name in module.names_of("value")
    }
    return {
        name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids_read & ids_of_values
    }


def _is_of_rows(moment: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a moment belongs to rows of a table of this shape: all rows, or the rows that were read."""
    return moment.dim() == len(shape) and moment.shape[-1] == shape[-1]


class Tables:
    """Support of a Trainer of any kind for large value tables.

    Args:
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
        trainer = self._trainer
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
        device = self._trainer.args.device
        tables = _with_rows(model)
        ids_with_rows = {id(table) for table in tables}
        split = {id(table) for table in self.columns.parameters.values()} if self.columns is not None else set()
        others: list[torch.Tensor] = [
            parameter for parameter in model.parameters() if id(parameter) not in ids_with_rows
        ]
        others += self._trainer.blocks.leaves()
        self._trainer.accelerator.unscale_gradients()
        of_columns: list[torch.Tensor] = []
        of_others: list[torch.Tensor] = []
        for parameter in others:
            if parameter.grad is not None:
                (of_columns if id(parameter) in split else of_others).append(parameter.grad)
        norms = [nn.utils.get_total_norm(of_others).to(device)]
        if self.columns is not None:
            norms.append(total(nn.utils.get_total_norm(of_columns).to(device)))
        norm = torch.stack(norms).norm()
        nn.utils.clip_grads_with_norm_(others, max_norm, norm)
        if tables:
            norm_of_rows = clip_rows(tables, max_norm, total)
            norm = torch.stack([norm.to(norm_of_rows.device), norm_of_rows]).norm()
        return norm


def check_reads_few_rows(model: nn.Module, option: str) -> None:
    """Check that a memory of a model reads few rows of a large table, as the option of this name needs, or raise `ValueError`."""
    kinds: tuple[type, ...] = (ReadsFewRows, GivesRowGradients) if option == "sparse_values" else (ReadsFewRows,)
    if not any(isinstance(module, kinds) for module in model.modules()):
        types = "ultramem or chapters" if option == "sparse_values" else "ultramem"
        raise ValueError(
            f"{option} is true, but no memory of this model reads few rows of a large table; expected one of type {types}. "
            "Leave it out."
        )


def _row_readers(model: nn.Module, shared_alone: bool) -> list[GivesRowGradients]:
    """Return what computes the gradients of the model's large tables, or only of tables whose columns processes can share."""
    readers: list[GivesRowGradients] = [
        module.table_reading for module in model.modules() if isinstance(module, ReadsFewRows)
    ]
    if not shared_alone:
        readers += [module for module in model.modules() if isinstance(module, GivesRowGradients)]
    return readers


def _with_rows(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients are sparse tensors of rows."""
    return [parameter for parameter in model.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
