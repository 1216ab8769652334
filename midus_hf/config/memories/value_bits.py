"""The option `value_bits`: tables of values that no longer train, as integers with one scale per row."""

from collections.abc import Mapping
from typing import Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor
from midus_hf.config.installed import not_carried

ValueBits = Literal[8, 4]
VALUE_BITS_HELP = (
    "bits per element of values that no longer train, whose rows are integers with a scale each, as quantise_tables makes them; "
    "null: the values train"
)


def in_bits(values: Mapping[str, DeclaredTensor], bits: ValueBits | None) -> dict[str, DeclaredTensor]:
    """Declare tables of values as they are stored: as they are, or as `NAME_integers` and `NAME_scales`.

    Args:
        values: The tables, `[..., N, W]`, by name.
        bits: Bits per element, 8 or 4; None for tables that train.
    """
    if bits is None:
        return dict(values)
    stored = {}
    for name, table in values.items():
        *rows, width = table.shape
        shape = (*rows, width if bits == 8 else width // 2)
        stored[f"{name}_integers"] = DeclaredTensor(shape, "buffer", ZEROS, dtype="int8" if bits == 8 else "uint8")
        stored[f"{name}_scales"] = DeclaredTensor(tuple(rows), "buffer", ONES)
    return stored


@not_carried
def check_bits(bits: ValueBits | None, widths: Mapping[str, int]) -> None:
    """Refuse rows that their number of bits does not fit.

    Args:
        bits: Bits per element, 8 or 4; None for tables that train.
        widths: Width of the rows of each table, by the name of the option or size that sets it.

    Raises:
        ValueError: If `bits` is 4 and a width is odd.
    """
    for name, width in widths.items():
        if bits == 4 and width % 2:
            raise ValueError(
                f"value_bits is 4 and {name} is {width}; expected an even width, two elements per byte. Choose 8 bits."
            )
