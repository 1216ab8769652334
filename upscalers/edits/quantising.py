"""Rounding of a checkpoint's banks to integers, which take less room and can no longer be trained."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from midus_hf.config.memory_types import check_fit
from upscalers.edits.chapter_banks import STORED_INTEGERS, Bank, ChapterMemory, check_all, row_names
from upscalers.edits.checkpoint_edit import Decided, EditRequest, edit_checkpoint
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class _Rounded(Recipe):
    """Recipe for one of the two parts of a rounded table: the integers or the scales of its rows."""

    source: str
    bits: int
    part: Literal["integers", "scales"]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        from midus_hf.ops.chapters.quantisation import quantise_rows

        part_index = ("integers", "scales").index(self.part)
        return torch.cat(
            [quantise_rows(rows, self.bits)[part_index] for rows in read(self.source).split(_ROWS_AT_ONCE)]
        )


def quantise(request: EditRequest, bits: int = 8) -> dict[str, Any]:
    """Round all rows of all banks of a memory to the nearest integers, with one scale per row.

    Args:
        request: The checkpoint to read and the folder to make.
        bits: Bits per integer, 8 or 4. Default: 8.

    Returns:
        The same keys as from `zero`, where `chapters` has all chapters.

    Raises:
        RequestError: If the bits are neither 8 nor 4; if the rows are rounded already, have an odd width with 4 bits,
            or hold a number that is not finite; if the request names one of several banks; or if the output cannot be
            made.
    """
    if bits not in STORED_INTEGERS:
        raise RequestError(f"bits is {bits}; expected {' or '.join(map(str, STORED_INTEGERS))}.")

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        check_all("quantise", memory, banks)
        if memory.options.bank_bits is not None:
            raise RequestError(
                f"memory {memory.name!r} has bank_bits = {memory.options.bank_bits} already; expected rows that were not rounded. "
                "Start from the checkpoint before it was quantised."
            )
        options = dataclasses.replace(memory.options, bank_bits=cast(Literal[8, 4], bits))
        with refusing_requests():
            check_fit(options, memory.model.memories.sizes)
        tensors = {bank.rows[0]: _rounded(memory, bank.rows[0], bits) for bank in banks}
        return Decided(options, tuple(range(options.chapters)), tensors, {"bits": bits})

    return edit_checkpoint("quantise", request, decide)


def _rounded(memory: ChapterMemory, name: str, bits: int) -> list[OutputTensor]:
    count, width = memory.model.tensors[name].shape
    prefix = name.removesuffix(row_names(None)[0])
    integers, scales = row_names(bits)
    shape = (count, width if bits == 8 else width // 2)
    return [
        OutputTensor(prefix + integers, _Rounded(shape, name, bits, "integers"), STORED_INTEGERS[bits]),
        OutputTensor(prefix + scales, _Rounded((count,), name, bits, "scales"), "F32"),
    ]
