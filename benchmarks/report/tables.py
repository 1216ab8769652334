"""Tables of ops and of whole models."""

from benchmarks.report.plots import model_images, op_image
from benchmarks.report.rows import Record, groups, having, newest, origin, short, table

NOTHING = "Nothing measured yet."
CASE = ("device", "op", "shape", "tokens", "popularity", "dtype")
_COLUMNS = ["case and provider", "forward, ms", "backward, ms", "both, ms", "peak, MB", "error", "of roofline"]
# Further columns for a GPU, by their heading. On a CPU the wall time is the only time.
_GPU_COLUMNS = {"host, ms": "host_ms", "wall, ms": "wall_ms", "launches": "launches"}


def op_section(rows: list[Record]) -> str:
    """Return a table per device and op, with all cases of the op."""
    if not rows:
        return NOTHING
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
            for (provider,), of_provider in groups(of_case, "provider").items():
                by_mode = {row["mode"]: row for row in of_provider}
                lines.append(_line(provider, by_mode) + [_by_pass(by_mode, name) for name in further.values()])
        parts.append(f"### `{op}` on {device}\n\n{origin(of_op)}\n\n{table(header, lines)}")
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in op_image(rows)]
    return "\n\n".join(parts)


def _line(provider: str, by_mode: dict[str, Record]) -> list[str]:
    if "" in by_mode:  # the provider is not timed because it disagrees with float64
        refused = by_mode[""]
        return [provider, refused["status"], "", "", "", _error(refused), ""]
    times = [_time(by_mode.get(mode)) for mode in ("forward", "backward", "forward+backward")]
    last = by_mode.get("forward+backward", list(by_mode.values())[-1])
    peak = short(last["peak_mb"]) if last["peak_mb"] else ""
    return [provider, *times, peak, _error(last), _by_pass(by_mode, "roofline_fraction")]


def _by_pass(by_mode: dict[str, Record], column: str) -> str:
    """Return a column's values of the forward and the backward pass, joined by a comma."""
    values = [by_mode[mode][column] for mode in ("forward", "backward") if mode in by_mode and by_mode[mode][column]]
    if column == "roofline_fraction":
        return ", ".join(f"{float(value):.0%}" for value in values)
    return ", ".join(value if column == "launches" else short(value) for value in values)


def _time(row: Record | None) -> str:
    if row is None:
        return ""
    return short(row["median_ms"]) if row["status"] == "ok" else row["status"]


def _error(row: Record) -> str:
    return f"{float(row['error']):.1e}" if row["error"] else ""


# Columns that name a case; tables show the newest run of each case.
RUN = ("device", "base", "dtype", "phase", "decoding")
_SETTING = ("batch", "accumulation", "length", "new_tokens")


def model_section(rows: list[Record]) -> str:
    """Return the tables of models per device, base and dtype.

    The first shows what the paper's tables 4 and 12 show. The others are by decoding, by size, and of where time goes.

    Args:
        rows: Rows of `model.csv`, summed over rounds by `over_rounds`.
    """
    if not rows:
        return NOTHING
    parts = []
    for (device, base, dtype), of_base in groups(newest(rows, *RUN), "device", "base", "dtype").items():
        parts.append(f"### {base} in {dtype} on {device}\n\n{origin(of_base)}\n\n{_overview(of_base)}")
        parts += [*_decodings(of_base), *_by_size(of_base), *_where_time_goes(of_base)]
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in model_images(rows)]
    return "\n\n".join(parts)


def first_point(rows: list[Record], phase: str) -> list[Record]:
    """Return a phase's rows at the main setting of a run, which is measured first. Decoding `eager` comes before others."""
    of_phase = having(rows, phase=phase)
    if not of_phase:
        return []
    first = next(iter(having(of_phase, decoding="eager")), of_phase[0])
    return having(of_phase, **{name: first[name] for name in (*_SETTING, "decoding")})


def _overview(rows: list[Record]) -> str:
    training, generating = first_point(rows, "train"), first_point(rows, "generate")
    header = [
        "method (placement)",
        "new, M",
        "trained, M",
        "all, M",
        "training, GB",
        "step, s",
        "generating, GB",
        "tokens/s",
    ]
    lines = []
    for key, of_model in groups(rows, "method", "placement").items():
        step, tokens = (_of(measured, key) for measured in (training, generating))
        counts = [f"{int(of_model[0][name]) / 1e6:,.1f}" for name in _COUNTS]
        cells = [
            _cell(step, "peak_gb"),
            _cell(step, "seconds"),
            _cell(tokens, "peak_gb"),
            _cell(tokens, "tokens_per_s"),
        ]
        lines.append([_name(key), *counts, *cells])
    notes = []
    if training:
        one = training[0]
        notes.append(f"a step: {one['batch']} x {one['length']} tokens in {one['accumulation']} passes")
    if generating:
        one = generating[0]
        how = "" if one["decoding"] == "eager" else f", {one['decoding']}"
        notes.append(f"generated: {one['new_tokens']} tokens behind {one['length']}, batch {one['batch']}{how}")
    notes += [f"greedy, with a cache; {_rounds(training + generating)}"] if notes else []
    return table(header, lines) + (f"\n\n({'; '.join(notes)}.)" if notes else "")


_COUNTS = ("new_parameters", "trained_parameters", "total_parameters")


def _decodings(rows: list[Record]) -> list[str]:
    """Return a table of tokens/s by decoding and batch; empty if only one of these was measured."""
    generated = having(rows, phase="generate")
    points = list(groups(generated, "decoding", "batch"))
    if len(points) < 2:
        return []
    header = [f"{decoding}, batch {batch}" for decoding, batch in points]
    matrix = _matrix(generated, ("decoding", "batch"), points, header, "tokens_per_s")
    return [f"Tokens/s of all sequences, by decoding ({_rounds(generated)}):\n\n{matrix}"]


def _by_size(rows: list[Record]) -> list[str]:
    """Return tables of seconds by batch and length, for phases that were measured at more than one size."""
    tables = []
    for title, phase in (
        ("Seconds of a prefill, by batch x prompt length", "prefill"),
        ("Seconds of an optimizer step, by batch x length", "train"),
    ):
        of_phase = having(rows, phase=phase)
        points = sorted(groups(of_phase, "batch", "length"), key=lambda point: (int(point[0]), int(point[1])))
        if len(points) > 1:
            header = [f"{batch} x {int(length):,}" for batch, length in points]
            matrix = _matrix(of_phase, ("batch", "length"), points, header, "seconds")
            tables.append(f"{title} ({_rounds(of_phase)}):\n\n{matrix}")
    return tables


def _where_time_goes(rows: list[Record]) -> list[str]:
    """Return a table of a GPU's times: the clock, the host, the kernels, and the number of kernels; empty on a CPU."""
    lines = []
    for row in rows:
        if row["host_s"]:
            batch, length = row["batch"], f"{int(row['length']):,}"
            setting = f"{row['decoding']}, batch {batch}" if row["decoding"] else f"{batch} x {length}"
            cells = [_cell(row, name) for name in ("seconds", "host_s", "device_s", "launches")]
            lines.append([_name((row["method"], row["placement"])), row["phase"], setting, *cells])
    header = ["method (placement)", "phase", "setting", "s", "host, s", "kernels, s", "kernels a token or prefill"]
    return [f"Where the time goes:\n\n{table(header, lines)}"] if lines else []


def _matrix(
    rows: list[Record], columns: tuple[str, str], points: list[tuple[str, ...]], header: list[str], value: str
) -> str:
    """Return a table of one value, with a line per model and a column per point of `points`."""
    lines = []
    for key, of_model in groups(rows, "method", "placement").items():
        by_point = {tuple(row[name] for name in columns): row for row in reversed(of_model)}
        lines.append([_name(key), *(_cell(by_point.get(point), value) for point in points)])
    return table(["method (placement)", *header], lines)


def _rounds(rows: list[Record]) -> str:
    """Return the number of rounds that rows summarise, in words."""
    counts = sorted({int(row["rounds"]) for row in rows})
    if counts == [1]:
        return "one round"
    return f"medians of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} rounds"


def _of(rows: list[Record], key: tuple[str, ...]) -> Record | None:
    return next((row for row in rows if (row["method"], row["placement"]) == key), None)


def _name(key: tuple[str, ...]) -> str:
    method, placement = key
    return f"{method} ({placement})" if placement else method


def _cell(row: Record | None, column: str) -> str:
    if row is None:
        return ""
    return row["status"] if row["status"] != "ok" else short(row[column]) if row[column] else ""
