"""Large tables whose columns are split over processes while a model trains."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.protocols import HostsTables, ReadsFewRows

# Numbers that all processes together send in one message when a table is gathered.
_NUMBERS_AT_ONCE = 1 << 24


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
            reader.table_reading.columns_of = group
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
            moments += [
                (state[parameter], key, moment) for key, moment in _moments(state.get(parameter, {}), parameter)
            ]
        for parameter, stretch in replaced:
            whole = self._gathered(stretch)
            if whole is not None:
                parameter.data = whole
        for parameter_state, key, stretch in moments:
            whole = self._gathered(stretch)
            parameter_state[key] = stretch if whole is None else whole
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

    def _gathered(self, stretch: torch.Tensor) -> torch.Tensor | None:
        """Return the whole table in the first process's host memory, gathered in parts; None elsewhere."""
        first, processes = self.group.rank() == 0, self.group.size()
        width = stretch.shape[-1]
        whole = torch.empty(len(stretch), width * processes, dtype=stretch.dtype) if first else None
        destination = dist.get_global_rank(self.group, 0)
        for start in range(0, len(stretch), max(1, _NUMBERS_AT_ONCE // (width * processes))):
            rows = stretch[start : start + max(1, _NUMBERS_AT_ONCE // (width * processes))].contiguous()
            parts = [torch.empty_like(rows) for _ in range(processes)] if first else None
            dist.gather(rows, parts, destination, group=self.group)
            if whole is not None and parts is not None:
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


def _moments(state: dict[str, Any], parameter: nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
    return [
        (key, value) for key, value in state.items() if torch.is_tensor(value) and _is_of_rows(value, parameter.shape)
    ]


def _is_of_rows(moment: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a moment belongs to rows of a table of this shape: all rows, or the rows that were read."""
    return moment.dim() == len(shape) and moment.shape[-1] == shape[-1]
