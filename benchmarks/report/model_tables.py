"""Tables of whole models."""

from benchmarks.report.plots import model_images
from benchmarks.report.rows import Record, groups, having, newest, origin, short, table

RUN = ("device", "base", "dtype", "phase")
"""The newest run is chosen for each of these."""


def model_section(rows: list[Record]) -> str:
    """For each device and base what the paper's tables 4 and 12 show, then prefill and steps by size."""
    if not rows:
        return "Nothing measured yet."
    parts = []
    for (device, base, dtype), found in groups(newest(rows, *RUN), "device", "base", "dtype").items():
        parts.append(f"### {base} in {dtype} on {device}\n\n{origin(found)}\n\n{_overview(found)}")
        for title, phase, points in _by_size(found):
            parts.append(f"{title}\n\n{_matrix(having(found, phase=phase), points)}")
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in model_images(rows)]
    return "\n\n".join(parts)


def first_point(rows: list[Record], phase: str, decoding: str = "") -> list[Record]:
    """Rows at the setting that a run measured first, which is its main one."""
    of_phase = having(rows, phase=phase, decoding=decoding)
    if not of_phase:
        return []
    first = of_phase[0]
    return having(of_phase, **{name: first[name] for name in ("batch", "accumulation", "length", "new_tokens")})


def _overview(rows: list[Record]) -> str:
    training = first_point(rows, "train")
    eager, graph = first_point(rows, "generate", "eager"), first_point(rows, "generate", "graph")
    header = [
        "method (placement)",
        "new, M",
        "trained, M",
        "all, M",
        "training, GB",
        "step, s",
        "generating, GB",
        "tokens/s",
        *(["tokens/s, CUDA graph"] if graph else []),
    ]
    lines = []
    for key, found in groups(rows, "method", "placement").items():
        step, tokens, graphed = (_of(measured, key) for measured in (training, eager, graph))
        counts = [f"{int(found[0][name]) / 1e6:,.1f}" for name in _COUNTS]
        cells = [
            _cell(step, "peak_gb"),
            _cell(step, "median_s"),
            _cell(tokens, "peak_gb"),
            _cell(tokens, "tokens_per_s"),
        ]
        lines.append([_name(key), *counts, *cells, *([_cell(graphed, "tokens_per_s")] if graph else [])])
    notes = []
    if training:
        one = training[0]
        notes.append(f"a step: {one['batch']} x {one['length']} tokens in {one['accumulation']} passes")
    if eager or graph:
        one = (eager or graph)[0]
        notes.append(f"generated: {one['new_tokens']} tokens behind {one['length']}, batch {one['batch']}")
    return table(header, lines) + (f"\n\n({'; '.join(notes)}; greedy, with a cache.)" if notes else "")


_COUNTS = ("new_parameters", "trained_parameters", "total_parameters")


def _by_size(rows: list[Record]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Titles, phases and points `(batch, length)` of the tables that have more than one."""
    tables = []
    for title, phase in (
        ("Seconds of a prefill, by batch x prompt length:", "prefill"),
        ("Seconds of an optimizer step, by batch x length:", "train"),
    ):
        points = list(groups(having(rows, phase=phase), "batch", "length"))
        if len(points) > 1:
            tables.append((title, phase, sorted(points, key=lambda point: (int(point[0]), int(point[1])))))
    return tables


def _matrix(rows: list[Record], points: list[tuple[str, str]]) -> str:
    header = ["method (placement)", *(f"{batch} x {int(length):,}" for batch, length in points)]
    lines = []
    for key, found in groups(rows, "method", "placement").items():
        cells = [having(found, batch=batch, length=length) for batch, length in points]
        lines.append([_name(key), *(_cell(cell[0] if cell else None, "median_s") for cell in cells)])
    return table(header, lines)


def _of(rows: list[Record], key: tuple[str, ...]) -> Record | None:
    return next((row for row in rows if (row["method"], row["placement"]) == key), None)


def _name(key: tuple[str, ...]) -> str:
    method, placement = key
    return f"{method} ({placement})" if placement else method


def _cell(row: Record | None, column: str) -> str:
    if row is None:
        return ""
    return row["status"] if row["status"] != "ok" else short(row[column]) if row[column] else ""
