"""Null controls: a memory beside which another stands that is the same but for its addressing.

A memory that does no better than its controls learned nothing from where it looks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Role
from midus_hf.config.memory_types import DeclaredControl, MemoryOptions
from midus_hf.config.model_sizes import ModelSizes

Control = DeclaredControl | Literal["frozen-addresses", "shuffled-addresses"]
"""`frozen-addresses`: what makes values trains, and nothing else. `shuffled-addresses`: after training, rows of values stand in
each other's places. Others are in `DeclaredControl`."""


@dataclass(frozen=True)
class Change:
    """What makes a control of a memory: one of these.

    Args:
        options: Of its entry in the config, in the place of others. Default: none.
        trainable: Roles, as `midus train` takes them for `trainable`. Default: what trains anyway.
        shuffled: Names of the tensors, within a layer's memory or a table, whose rows `upscale shuffle` permutes when training
            is over. Default: none.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    trainable: tuple[Role, ...] = ()
    shuffled: tuple[str, ...] = ()


def controls_of(
    options: MemoryOptions, sizes: ModelSizes, layers: tuple[int, ...] | None = None
) -> dict[Control, Change]:
    """The controls that a memory has, and what makes each.

    `frozen-addresses` and `shuffled-addresses` follow from the roles of what the options declare, for a type of another package too.
    Frozen addresses need values, something else that trains, and no projection that is frozen at zero, behind which the memory
    would never add anything. Shuffled ones need values with a row for each of several slots.

    Args:
        options: Of the memory.
        sizes: Of the model.
        layers: Those that have the memory, ascending, by which tables are shared. Default: all.
    """
    shared = options.tables(sizes, tuple(range(sizes.num_layers)) if layers is None else layers)
    tensors = {**options.tensors(sizes), **{name: tensor for one in shared for name, tensor in one.tensors.items()}}
    changes: dict[Control, Change] = {
        name: Change(options={**change})
        for name in get_args(DeclaredControl)
        if (change := options.controls.get(name))
    }
    trained = _trained_alone(options, tensors)
    if trained:
        changes["frozen-addresses"] = Change(trainable=trained)
    shuffled = tuple(name for name, tensor in tensors.items() if num_value_rows(tensor) > 1)
    if shuffled:
        changes["shuffled-addresses"] = Change(shuffled=shuffled)
    return changes


def num_value_rows(tensor: DeclaredTensor) -> int:
    """How many rows of values a tensor has, one per slot; 0 if it holds none."""
    return tensor.shape[-2] if tensor.role == "value" and len(tensor.shape) > 1 else 0


def _trained_alone(options: MemoryOptions, tensors: Mapping[str, DeclaredTensor]) -> tuple[Role, ...]:
    """The roles that train where addresses are frozen; none where that is no control."""
    roles = {tensor.role for tensor in tensors.values()} - {"buffer"}
    frozen = [tensor for tensor in tensors.values() if tensor.role not in options.value_roles]
    is_cut_off = any(tensor.role == "projection" and tensor.initial == ZEROS for tensor in frozen)
    if "value" not in roles or is_cut_off or roles <= {*options.value_roles}:
        return ()
    return tuple(role for role in options.value_roles if role in roles)
