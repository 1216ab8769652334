"""Tables of ops."""

from benchmarks.report.plots import op_image
from benchmarks.report.rows import Record, groups, newest, origin, short, table

CASE = ("device", "op", "shape", "tokens", "popularity", "dtype")
_NOTHING = "Nothing measured yet."
_COLUMNS = ["case and provider", "forward, ms", "backward, ms", "both, ms", "peak, MB", "error", "of roofline"]
_GPU_COLUMNS = {"host, ms": "host_ms", "wall, ms": "wall_ms", "launches": "launches"}
"""By their heading; on a CPU there is the wall time alone."""


def op_section(rows: list[Record]) -> str:
    """A table for each device and op, its cases one after the other."""
    if not rows:
        return _NOTHING
    parts = []
    for (device, op), of_op in groups(newest(rows, *CASE), "device", "op").items():
        further = _GPU_COLUMNS if any(row["backend"] == "cuda" for row in of_op) else {}
        header = [*_COLUMNS, *further]
        lines = []
        for (shape, tokens, popularity, dtype), of_case in groups(of_op, *CASE[2:]).items():
            plural = "s" if tokens != "1" else ""
            lines.append(
                [f"**{shape}, {int(tokens):,} token{plural}, {popularity}, {dtype}**"] + [""] * (len(header) - 1)
            )
            for (provider,), found in groups(of_case, "provider").items():
                by_mode = {row["mode"]: row for row in found}
                lines.append(_line(provider, by_mode) + [_by_pass(by_mode, name) for name in further.values()])
        parts.append(f"### `{op}` on {device}\n\n{origin(of_op)}\n\n{table(header, lines)}")
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in op_image(rows)]
    return "\n\n".join(parts)


def _line(provider: str, by_mode: dict[str, Record]) -> list[str]:
    if "" in by_mode:  # the gate refused it
        refused = by_mode[""]
        return [provider, refused["status"], "", "", "", _error(refused), ""]
    times = [_time(by_mode.get(mode)) for mode in ("forward", "backward", "forward+backward")]
    last = by_mode.get("forward+backward", list(by_mode.values())[-1])
    peak = short(last["peak_mb"]) if last["peak_mb"] else ""
    return [provider, *times, peak, _error(last), _by_pass(by_mode, "roofline_fraction")]


def _by_pass(by_mode: dict[str, Record], column: str) -> str:
    """Forward and backward, side by side."""
    found = [by_mode[mode][column] for mode in ("forward", "backward") if mode in by_mode and by_mode[mode][column]]
    if column == "roofline_fraction":
        return ", ".join(f"{float(value):.0%}" for value in found)
    return ", ".join(value if column == "launches" else short(value) for value in found)


def _time(row: Record | None) -> str:
    if row is None:
        return ""
    return short(row["median_ms"]) if row["status"] == "ok" else row["status"]


def _error(row: Record) -> str:
    return f"{float(row['error']):.1e}" if row["error"] else ""
