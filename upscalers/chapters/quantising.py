"""Rounding the banks of a checkpoint to integers, which take less room and no longer train."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from upscalers.chapters.banks import STORED_INTEGERS, Bank, ChapterMemory, check_all, row_names
from upscalers.chapters.checkpoint_edit import Decided, EditRequest, edit_checkpoint
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class _Rounded(Recipe):
    """What a table of rows becomes when these are rounded: their integers, or their scales.

    Args:
        source: Full name of the table.
        bits: Of each integer.
        part: Which of the two.
    """

    source: str
    bits: int
    part: Literal["integers", "scales"]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        from midus_hf.ops.chapters.quantisation import quantise_rows

        place = ("integers", "scales").index(self.part)
        return torch.cat([quantise_rows(rows, self.bits)[place] for rows in read(self.source).split(_ROWS_AT_ONCE)])


def quantise(request: EditRequest, bits: int = 8) -> dict[str, Any]:
    """Round all rows of all banks of a memory to integers with a scale each; the nearest is taken.

    Args:
        request: From what to what.
        bits: 8 or 4. Default: 8.

    Returns:
        As `zero`; `chapters` are all of them.

    Raises:
        RequestError: If the bits are neither, the rows are integers already, too odd to be put two to a byte or not finite, only
            some banks are named, or the output cannot be made.
    """
    if bits not in STORED_INTEGERS:
        raise RequestError(f"bits is {bits}; expected {' or '.join(map(str, STORED_INTEGERS))}.")

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        check_all("quantise", memory, banks)
        if memory.options.bank_bits is not None:
            raise RequestError(
                f"memory {memory.name!r} has bank_bits = {memory.options.bank_bits} already; expected rows that were not rounded. Go "
                "back to the checkpoint before it was."
            )
        options = dataclasses.replace(memory.options, bank_bits=cast(Literal[8, 4], bits))
        with refusing_requests():
            options.check(memory.model.memories.sizes)
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
