"""Tables of attention over the depth: the goals, and the time of each way to join the depth with the sequence."""

from benchmarks.depth_cost.shapes import JOINED, PAPER, Shape
from benchmarks.report.rows import Record, groups, having, newest, origin, short, table, without_empty_columns

_SHAPE = ("tokens", "group", "slots")
_CASE = ("device", "dtype", *_SHAPE)
# Goals: least speed of attention to sequence and depth, as a share of FlashAttention's speed on the sequence alone.
_SPEEDS = {Shape(65536, 8, 64): 0.98, Shape(4096, 8, 64): 0.85, Shape(16384, 8, 256): 0.90}
# Goal: most time of the depth alone, as a multiple of its bound.
_MOST_BOUNDS = 1.5


def depth_section(rows: list[Record]) -> str:
    """Return the table of goals, all of which are for a GPU, and a table per device and dtype."""
    latest = newest(rows, *_CASE)
    parts = [_goals([row for row in latest if row["device"] != "cpu"])]
    for _, of_device in groups(latest, "device", "dtype").items():
        parts.append(_table(of_device))
    return "\n\n".join(parts)


def _goals(rows: list[Record]) -> str:
    lines = []
    for shape, least in _SPEEDS.items():
        speeds = {
            row["what"]: _ms(having(of_shape, what="sequence")) / float(row["median_ms"])
            for of_shape in _shapes(rows, shape)
            for row in _timed(of_shape)
            if row["what"] in JOINED and _timed(having(of_shape, what="sequence"))
        }
        sizes = f"{shape.tokens:,} tokens, {shape.group} queries per key, {shape.slots} slots"
        text = f"GPU, {sizes}: at least {least:.0%} of FlashAttention's speed"
        measured = ", ".join(f"{what} {speed:.1%}" for what, speed in speeds.items())
        lines.append(_goal(text, measured, max(speeds.values(), default=0.0) >= least))
    bounds = [
        _ms(having(of_shape, what="depth")) / _ms(having(of_shape, what="bound"))
        for of_shape in groups(rows, *_CASE).values()
        if all(_timed(having(of_shape, what=what)) for what in ("depth", "bound"))
    ]
    text = f"GPU: the depth alone takes at most {_MOST_BOUNDS} times its bound, at every shape"
    measured = f"{max(bounds):.2f} at worst, {min(bounds):.2f} at best" if bounds else ""
    lines.append(_goal(text, measured, max(bounds, default=0.0) <= _MOST_BOUNDS))
    measured = [line for line in lines if line[1]]
    parts = [table(["goal", "measured", "reached"], measured)] if measured else []
    unmeasured = "\n".join(f"- {text}" for text, ratios, _ in lines if not ratios)
    return "\n\n".join([*parts, *([f"Not measured:\n\n{unmeasured}"] if unmeasured else [])])


def _goal(text: str, measured: str, is_reached: bool) -> list[str]:
    return [text, measured, ("yes" if is_reached else "no") if measured else ""]


def _shapes(rows: list[Record], shape: Shape) -> list[list[Record]]:
    """Return the rows of a shape, one list per device and dtype."""
    of_shape = having(rows, tokens=shape.tokens, group=shape.group, slots=shape.slots)
    return list(groups(of_shape, "device", "dtype").values())


def _table(rows: list[Record]) -> str:
    """Return a table with the time of each way at each shape, and its speed as a share of FlashAttention's."""
    has_wall = any(row["wall_ms"] for row in rows)
    header = ["tokens x group x slots", "what", "ms", *(["host, ms", "wall, ms"] if has_wall else [])]
    header += ["of FlashAttention's speed", "paper's, A100", "error", "kernel"]
    lines = []
    for sizes, of_shape in groups(rows, *_SHAPE).items():
        shape = Shape(*map(int, sizes))
        for row in of_shape:
            times = [row["median_ms"], *([row["host_ms"], row["wall_ms"]] if has_wall else [])]
            cells = [short(value) if value else "" for value in times]
            cells[0] = cells[0] or row["status"]
            lines.append([str(shape), row["what"], *cells, *_ratios(shape, row, of_shape), _error(row), row["kernel"]])
    shown = table(*without_empty_columns(header, lines))
    return f"### Depth on {rows[0]['device']}, {rows[0]['dtype']}\n\n{_origin(rows)}\n\n{shown}"


def _ratios(shape: Shape, row: Record, of_shape: list[Record]) -> list[str]:
    sequence = _timed(having(of_shape, what="sequence"))
    if row["what"] not in JOINED or not _timed([row]) or not sequence:
        return ["", ""]
    paper = PAPER.get(shape)
    return [f"{_ms(sequence) / float(row['median_ms']):.1%}", "" if paper is None else f"{paper[0] / paper[1]:.1%}"]


def _timed(rows: list[Record]) -> list[Record]:
    return [row for row in rows if row["status"] == "ok"]


def _ms(rows: list[Record]) -> float:
    return float(rows[0]["median_ms"])


def _error(row: Record) -> str:
    return f"{float(row['error']):.1e}" if row["error"] else ""


def _origin(rows: list[Record]) -> str:
    return origin([{**row, "backend": "cpu" if row["device"] == "cpu" else "cuda"} for row in rows])
