"""Null controls: variants of a memory that differ from it in how slots are addressed.

A memory that does no better than its controls gained nothing from learning which slots to read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes, Role
from midus_hf.memories.options import DeclaredControl, MemoryOptions

# `frozen-addresses`: only tensors that make values train. `shuffled-addresses`: rows of values are permuted after training.
Control = DeclaredControl | Literal["frozen-addresses", "shuffled-addresses"]


@dataclass(frozen=True)
class Change:
    """Change that turns a memory into a control. Exactly one of the three fields is set."""

    #: Options of the memory's config entry that take new values.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Roles that train, as `midus train`'s option `trainable` has them.
    trainable: tuple[Role, ...] = ()
    #: Names of the tensors, within a layer's memory or a table, whose rows `upscale shuffle` permutes after training.
    shuffled: tuple[str, ...] = ()


def controls_of(
    options: MemoryOptions, sizes: ModelSizes, layers: tuple[int, ...] | None = None
) -> dict[Control, Change]:
    """Return the controls of a memory by name, each with the change that defines it.

    `frozen-addresses` and `shuffled-addresses` follow from the roles of the declared tensors. `frozen-addresses` needs values, a
    parameter of a role outside `value_roles`, and no projection that would be frozen at zero, because the memory could then never
    add anything; `shuffled-addresses` needs values with two or more rows. `layers` are the ascending indices of the memory's
    layers, which decide how tables are shared. Default: all layers.
    """
    shared = options.tables(sizes, tuple(range(sizes.num_layers)) if layers is None else layers)
    tensors = {**options.tensors(sizes), **{name: tensor for one in shared for name, tensor in one.tensors.items()}}
    changes: dict[Control, Change] = {
        name: Change(options={**change})
        for name in get_args(DeclaredControl)
        if (change := options.controls.get(name))
    }
    roles = {tensor.role for tensor in tensors.values()} - {"buffer"}
    frozen = [tensor for tensor in tensors.values() if tensor.role not in options.value_roles]
    is_cut_off = any(tensor.role == "projection" and tensor.initial == ZEROS for tensor in frozen)
    if "value" in roles and not is_cut_off and not roles <= {*options.value_roles}:
        changes["frozen-addresses"] = Change(trainable=tuple(role for role in options.value_roles if role in roles))
    shuffled = tuple(name for name, tensor in tensors.items() if num_value_rows(tensor) > 1)
    if shuffled:
        changes["shuffled-addresses"] = Change(shuffled=shuffled)
    return changes


def num_value_rows(tensor: DeclaredTensor) -> int:
    """Return the number of rows of values in a tensor, one per slot; 0 if the tensor holds no values."""
    return tensor.shape[-2] if tensor.role == "value" and len(tensor.shape) > 1 else 0
