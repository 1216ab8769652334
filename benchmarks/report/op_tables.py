"""Tables of ops."""

from benchmarks.report.plots import op_image
from benchmarks.report.rows import Record, groups, newest, origin, short, table

CASE = ("device", "op", "shape", "tokens", "popularity", "dtype")
_NOTHING = "Nothing measured yet."
_COLUMNS = ["case and provider", "forward, ms", "backward, ms", "both, ms", "peak, MB", "error", "of roofline"]


def op_section(rows: list[Record]) -> str:
    """A table for each device and op, its cases one after the other."""
    if not rows:
        return _NOTHING
    parts = []
    for (device, op), of_op in groups(newest(rows, *CASE), "device", "op").items():
        lines = []
        for (shape, tokens, popularity, dtype), of_case in groups(of_op, *CASE[2:]).items():
            plural = "s" if tokens != "1" else ""
            lines.append([f"**{shape}, {int(tokens):,} token{plural}, {popularity}, {dtype}**"] + [""] * 6)
            lines += [_line(provider, found) for (provider,), found in groups(of_case, "provider").items()]
        parts.append(f"### `{op}` on {device}\n\n{origin(of_op)}\n\n{table(_COLUMNS, lines)}")
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in op_image(rows)]
    return "\n\n".join(parts)


def _line(provider: str, rows: list[Record]) -> list[str]:
    by_mode = {row["mode"]: row for row in rows}
    if "" in by_mode:  # the gate refused it
        refused = by_mode[""]
        return [provider, refused["status"], "", "", "", _error(refused), ""]
    times = [_time(by_mode.get(mode)) for mode in ("forward", "backward", "forward+backward")]
    last = by_mode.get("forward+backward", rows[-1])
    peak = short(last["peak_mb"]) if last["peak_mb"] else ""
    fractions = [
        f"{float(by_mode[mode]['roofline_fraction']):.0%}"
        for mode in ("forward", "backward")
        if mode in by_mode and by_mode[mode]["roofline_fraction"]
    ]
    return [provider, *times, peak, _error(last), ", ".join(fractions)]


def _time(row: Record | None) -> str:
    if row is None:
        return ""
    return short(row["median_ms"]) if row["status"] == "ok" else row["status"]


def _error(row: Record) -> str:
    return f"{float(row['error']):.1e}" if row["error"] else ""
