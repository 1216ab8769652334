"""What solvers found out about the tensors they made, in short."""

from collections.abc import Sequence

from upscalers.tensors.solver import Measurement

_NOT_NUMBERS = ("layer", "tensor")


def summary_table(measurements: Sequence[Measurement]) -> list[list[str]]:
    """A header and one row per kind of tensor: for each number its mean, and in brackets its lowest and highest value.

    Seconds are summed instead.
    """
    columns = [key for key in measurements[0] if key not in _NOT_NUMBERS]
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
