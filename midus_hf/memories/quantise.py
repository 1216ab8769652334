"""Rounding of the tables of a loaded model to integers, for serving."""

import dataclasses
from typing import Any, get_args

import torch
from torch import nn

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import MemoryEntry, memories_of
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.retrieval.options import ValueBits, in_bits
from midus_hf.memories.tables import DeclaredModule
from midus_hf.ops.chapters.quantisation import quantise_rows

# Rows that are rounded at a time, so that float32 copies stay small.
_ROWS_AT_ONCE = 1 << 16


def quantise_tables(model: Any, bits: int = 8) -> None:
    """Round the tables of values of a model's memories to integers with one scale per row, in place; the model then no longer trains.

    A row is divided by its largest magnitude over 127 (8 bits) or 7 (4 bits), and rounded to the nearest integers. Integers take one
    byte, or half a byte, and scales have the dtype of the model. A pass dequantises the rows that it reads. Keys, transforms and
    projections stay as they are. `save_pretrained` saves integers and scales, and `from_pretrained` loads them.

    Args:
        model: A model in evaluation mode whose memories are of the types `headwise`, `product-key`, `linear` or `ultramem`, loaded
            without offloading.
        bits: Bits per element, 8 or 4. Default: 8.

    Raises:
        ValueError: If `bits` is neither 8 nor 4; if the model trains, has no table of values, has tables that are rounded already, of
            another type of memory, of odd width with 4 bits, that are offloaded, or with a number that is not finite.
    """
    if bits not in get_args(ValueBits):
        raise ValueError(f"bits is {bits}; expected {' or '.join(map(str, get_args(ValueBits)))}.")
    if model.training:
        raise ValueError("the model is in training mode, and integers do not train; expected model.eval().")
    config = model.config.get_text_config()
    memories = memories_of(config)
    with_values = [entry for entry in memories.entries if _has_values(entry, memories.sizes)]
    _check_entries(with_values, bits, memories.sizes)
    holders = [module for module in model.modules() if isinstance(module, DeclaredModule) and module.names_of("value")]
    for holder in holders:
        for name in holder.names_of("value"):
            _check_table(name, holder.declared_tensor(name))
    for holder in holders:
        _round_within(holder, bits)
    for module in model.modules():
        if isinstance(module, MemoryModule) and hasattr(module.options, "value_bits"):
            module.options = dataclasses.replace(module.options, value_bits=bits)
            module.decode_cache = None  # expanded values would take more room than the tables did
    config.memory = [
        {**written, "value_bits": bits} if entry in with_values else written
        for written, entry in zip(config.memory, memories.entries, strict=True)
    ]


def refuse_quantised(model: Any) -> None:
    """Refuse to train a model whose tables of values are integers.

    Args:
        model: A model of Transformers, with memory or without.

    Raises:
        ValueError: If a memory of the model has `value_bits`.
    """
    for module in model.modules():
        bits = getattr(module.options, "value_bits", None) if isinstance(module, MemoryModule) else None
        if bits is not None:
            raise ValueError(
                f"a memory of type {module.options.type!r} has value_bits = {bits}, and integers do not train; expected a model with "
                "value_bits = null. Train the checkpoint from which quantise_tables made this one."
            )


def _has_values(entry: MemoryEntry, sizes: ModelSizes) -> bool:
    tables = [shared.tensors for shared in entry.options.tables(sizes, entry.layers)]
    tensors = [tensor for each in (entry.options.tensors(sizes), *tables) for tensor in each.values()]
    bits = getattr(entry.options, "value_bits", None)
    return bits is not None or any(tensor.role == "value" for tensor in tensors)


def _check_entries(entries: list[MemoryEntry], bits: int, sizes: ModelSizes) -> None:
    if not entries:
        raise ValueError("the model has no table of values; expected a model with a memory of slots.")
    for entry in entries:
        options = entry.options
        if not hasattr(options, "value_bits"):
            remedy = (
                "Round its bank with midus edit quantise."
                if options.type == "chapters"
                else "Its values stay as they are."
            )
            raise ValueError(
                f"the model has a memory of type {options.type!r}, whose tables quantise_tables cannot round; expected memories of "
                f"slots alone. {remedy}"
            )
        if options.value_bits is not None:
            raise ValueError(
                f"memory {entry.name or options.type!r} has value_bits = {options.value_bits} already; expected values that were "
                "not rounded. Load the checkpoint from before."
            )
        dataclasses.replace(options, value_bits=bits).check_fit(sizes)  # type: ignore[call-arg]


def _check_table(name: str, table: torch.Tensor) -> None:
    if table.is_meta or type(table) is not nn.Parameter:
        raise ValueError(
            f"{name} is on the {table.device.type} device as {type(table).__name__}; expected a Parameter in memory. Load the model "
            "without offloading or sharding."
        )
    if not all(bool(rows.isfinite().all()) for rows in table.split(_ROWS_AT_ONCE)):
        raise ValueError(f"{name} has a number that is not finite, which has no integer; expected finite numbers.")


@torch.no_grad()
def _round_within(holder: DeclaredModule, bits: int) -> None:
    """Replace the tables of values of a module by integers and scales, in the order of declaration."""
    declared = holder.declared
    holder.declared = {}
    for name, tensor in declared.items():
        if tensor.role != "value":
            holder.declared[name] = tensor
            continue
        table = holder.declared_tensor(name)
        delattr(holder, name)
        rows = table.flatten(0, -2).split(_ROWS_AT_ONCE)
        integers, scales = (
            torch.cat(parts) for parts in zip(*(quantise_rows(some, bits) for some in rows), strict=True)
        )
        stored = (integers.view(*table.shape[:-1], -1), scales.to(table.dtype).view(table.shape[:-1]))
        for (part, described), values in zip(in_bits({name: tensor}, bits).items(), stored, strict=True):  # type: ignore[arg-type]
            holder.register_buffer(part, values)
            holder.declared[part] = described
