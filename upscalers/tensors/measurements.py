"""Summary of what solvers measured about the tensors they made."""

from collections.abc import Sequence

from upscalers.tensors.solver import Measurement

_NOT_NUMBERS = ("layer", "tensor")


def summary_table(measurements: Sequence[Measurement], with_seconds: bool = True) -> list[list[str]]:
    """Return a table with a header and one row per kind of tensor.

    A cell has the mean of a number and, in brackets, its lowest and highest value.

    Args:
        measurements: One measurement per tensor that a solver made; at least one.
        with_seconds: Whether to show seconds, summed. Seconds differ from run to run. Default: True.
    """
    left_out = (*_NOT_NUMBERS, *(() if with_seconds else ("seconds",)))
    columns = [key for key in measurements[0] if key not in left_out]
    rows = [["tensor", "layers", *(column.replace("_", " ") for column in columns)]]
    for tensor in dict.fromkeys(row["tensor"] for row in measurements):
        group = [row for row in measurements if row["tensor"] == tensor]
        rows.append(
            [tensor, str(len(group)), *(_cell(column, [row.get(column) for row in group]) for column in columns)]
        )
    return rows


def _cell(column: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if column == "seconds":
        return f"{sum(known):.1f}"
    mean, lowest, highest = sum(known) / len(known), min(known), max(known)
    return f"{mean:.3g}" if lowest == highest else f"{mean:.3g} ({lowest:.3g} to {highest:.3g})"
