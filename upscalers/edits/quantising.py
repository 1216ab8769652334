"""Rounding of the tables of values of a checkpoint's memories to integers, for serving."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import MemoryEntry
from midus_hf.memories.retrieval.options import ValueBits, bits_option, in_bits
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.edits.checkpoint_edit import EditDetails, EditRequest, edit_checkpoint, name_of, value_tables
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

# Dtypes of integers as safetensors names them.
_STORED_INTEGERS = {"int8": "I8", "uint8": "U8"}
# Rows that are rounded at a time, so that float32 copies stay small.
_ROWS_AT_ONCE = 1 << 12


def quantise(request: EditRequest, bits: int = 8) -> dict[str, Any]:
    """Round the tables of values of a model's memories to integers with one scale per row. The tables can no longer be trained.

    A row is divided by its largest magnitude over 127 (8 bits) or 7 (4 bits), and rounded to the nearest integers. Integers take one
    byte, or half a byte, and scales have the dtype of the table. A pass dequantises the rows that it reads. Keys, transforms and
    projections do not change.

    Args:
        request: The checkpoint to read and the folder to make. Its memories are of the types `headwise`, `product-key`, `linear`,
            `ultramem` and `chapters`.
        bits: Bits per element, 8 or 4. Default: 8.

    Returns:
        As from `edit_checkpoint`, with `bits`.

    Raises:
        ValueError: If `bits` is neither 8 nor 4; if no memory has this name, or has values; if values are rounded already, belong
        to
            another type of memory, have an odd width with 4 bits, or contain a number that is not finite; or if the output cannot be
            made.
    """
    if bits not in get_args(ValueBits):
        raise ValueError(f"bits is {bits}; expected {' or '.join(map(str, get_args(ValueBits)))}.")

    def decide(model: BaseCheckpoint) -> EditDetails:
        memories = model.layout.memories
        tables = {name: memory for name, memory, _ in value_tables(model)}
        entries: dict[str, list[MemoryEntry]] = {}
        for entry in memories.entries:
            if name_of(entry) in tables.values() or _bits_of(entry.options) is not None:
                entries.setdefault(name_of(entry), []).append(entry)
        if not entries:
            raise ValueError(
                f"{model.folder} has no table of values; expected a model with a memory of slots or of chapters."
            )
        if request.memory not in (None, *entries):
            raise ValueError(
                f"memory is {request.memory!r}; expected a memory with values, of which the model has: {', '.join(entries)}."
            )
        chosen = [request.memory] if request.memory else list(entries)
        options = {}
        for memory in chosen:
            for entry in entries[memory]:
                options[memory] = {_checked_option(entry, bits, memories.sizes): bits}
        tensors = {name: _rounded(model, name, bits) for name, memory in tables.items() if memory in chosen}
        return EditDetails(chosen, tensors, {"bits": bits}, options)

    return edit_checkpoint("quantise", request, decide)


def _bits_of(options: Any) -> int | None:
    return getattr(options, bits_option(options) or "", None)


def _checked_option(entry: MemoryEntry, bits: int, sizes: ModelSizes) -> str:
    """Return the name of the option for the bits of a memory, or refuse a memory that cannot be rounded to these bits."""
    name = bits_option(entry.options)
    if name is None:
        raise ValueError(
            f"memory {name_of(entry)!r} is of type {entry.options.type!r}, whose values cannot be rounded and stay as they are. Name "
            "another with --memory."
        )
    if _bits_of(entry.options) is not None:
        raise ValueError(
            f"memory {name_of(entry)!r} has {name} = {_bits_of(entry.options)} already; expected values that were not rounded. Start "
            "from the checkpoint before it was quantised."
        )
    dataclasses.replace(entry.options, **{name: bits}).check_fit(sizes)
    return name


def _rounded(model: BaseCheckpoint, name: str, bits: int) -> list[OutputTensor]:
    stored = model.tensors[name]
    parts = in_bits({name: DeclaredTensor(stored.shape, "value", ZEROS)}, cast(ValueBits, bits))
    return [
        OutputTensor(
            part, _RoundedPart(tensor.shape, name, bits, index), _STORED_INTEGERS.get(tensor.dtype, stored.dtype)
        )
        for index, (part, tensor) in enumerate(parts.items())
    ]


@dataclass(frozen=True)
class _RoundedPart(Recipe):
    """Recipe for one of the two parts of a rounded table: the integers (0) or the scales (1) of its rows."""

    source: str
    bits: int
    part: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        from midus_hf.ops.chapters.quantisation import quantise_rows

        rows = read(self.source).flatten(0, -2).split(_ROWS_AT_ONCE)
        return torch.cat([quantise_rows(some, self.bits)[self.part] for some in rows]).view(self.shape)
