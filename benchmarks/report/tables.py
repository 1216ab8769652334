"""Tables of ops and of whole models."""

from benchmarks.report.plots import model_images, op_image
from benchmarks.report.rows import Record, groups, having, newest, origin, short, table, without_empty_columns

NOTHING = "Nothing measured yet."
CASE = ("device", "op", "shape", "tokens", "popularity", "dtype")
_COLUMNS = ["case and provider", "forward, ms", "backward, ms", "both, ms", "peak, MB", "error", "of roofline"]
_PASSES = ("forward", "backward")
_GPU_COLUMNS = {"host, ms": "host_ms", "wall, ms": "wall_ms", "launches": "launches"}


def op_section(rows: list[Record], has_all: bool = False) -> str:
    """Return a table per device and op, with all cases of the op: a line per case on a CPU, one per provider on a GPU."""
    if not rows:
        return NOTHING
    parts = []
    for (device, op), of_op in groups(newest(rows, *CASE), "device", "op").items():
        is_gpu = any(row["backend"] == "cuda" for row in of_op)
        if not (is_gpu or has_all or op == "headwise_memory"):
            continue
        shown = _lines_by_provider(of_op) if is_gpu else _lines_by_case(of_op)
        parts.append(f"### `{op}` on {device}\n\n{origin(of_op)}\n\n{shown}")
    parts += [f"![{alternative}](images/{name})" for name, alternative, _ in op_image(rows)]
    return "\n\n".join(parts)


def _lines_by_case(rows: list[Record]) -> str:
    """Return tables of one op with a column per provider: ms of the forward and the backward pass, and peaks in MB.

    Cases with the same providers share a table.
    """
    lines: dict[tuple[str, ...], list[list[str]]] = {}
    for case, of_case in groups(rows, *CASE[2:]).items():
        providers = tuple(provider for (provider,) in groups(of_case, "provider"))
        passes, peaks = [], []
        for provider in providers:
            by_mode = {row["mode"]: row for row in having(of_case, provider=provider)}
            times = [by_mode[""]["status"]] if "" in by_mode else [_time(by_mode.get(mode)) for mode in _PASSES]
            passes.append(", ".join(filter(None, times)))
            peak = by_mode["forward+backward"]["peak_mb"] if "forward+backward" in by_mode else ""
            peaks.append(short(peak) if peak else "")
        of_providers = lines.setdefault(providers, [])
        of_providers.append([_case(*case), *passes])
        if any(peaks):
            of_providers.append(["peak, MB", *peaks])
    return "\n\n".join(table(["ms by case", *providers], listed) for providers, listed in lines.items())


def _lines_by_provider(rows: list[Record]) -> str:
    """Return a table of one op on a GPU with a line per case and provider."""
    header = [*_COLUMNS, *_GPU_COLUMNS]
    lines = []
    for case, of_case in groups(rows, *CASE[2:]).items():
        lines.append([f"**{_case(*case)}**"] + [""] * (len(header) - 1))
        for (provider,), of_provider in groups(of_case, "provider").items():
            by_mode = {row["mode"]: row for row in of_provider}
            lines.append(_line(provider, by_mode) + [_by_pass(by_mode, name) for name in _GPU_COLUMNS.values()])
    return table(header, lines)


def _case(shape: str, tokens: str, popularity: str, dtype: str) -> str:
    return f"{shape}, {int(tokens):,} token{'s' if tokens != '1' else ''}, {popularity}, {dtype}"


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
    values = [by_mode[mode][column] for mode in _PASSES if mode in by_mode and by_mode[mode][column]]
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

    The first shows what the paper's tables 4 and 12 show. The others are by decoding and of where time goes; plots
    show the time by size.
    """
    if not rows:
        return NOTHING
    parts = []
    for (device, base, dtype), of_base in groups(newest(rows, *RUN), "device", "base", "dtype").items():
        parts.append(f"### {base} in {dtype} on {device}\n\n{origin(of_base)}\n\n{_overview(of_base)}")
        parts += [*_decodings(of_base), *_where_time_goes(of_base)]
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
    header = ["method (placement)", "new, M", "trained, M", "training, GB", "step, s", "generating, GB", "tokens/s"]
    lines = []
    steps, tokens = ({(row["method"], row["placement"]): row for row in reversed(of)} for of in (training, generating))
    for key, of_model in groups(rows, "method", "placement").items():
        counts = [f"{int(of_model[0][name]) / 1e6:,.1f}" for name in ("new_parameters", "trained_parameters")]
        cells = [_cell(steps.get(key), name) for name in ("peak_gb", "seconds")]
        cells += [_cell(tokens.get(key), name) for name in ("peak_gb", "tokens_per_s")]
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
    shown = table(*without_empty_columns(header, lines))
    return shown + (f"\n\n({'; '.join(notes)}.)" if notes else "")


def _decodings(rows: list[Record]) -> list[str]:
    """Return a table of tokens/s by decoding and batch; empty if only one of these was measured."""
    generated = having(rows, phase="generate")
    points = list(groups(generated, "decoding", "batch"))
    if len(points) < 2:
        return []
    lines = []
    for key, of_model in groups(generated, "method", "placement").items():
        by_point = {(row["decoding"], row["batch"]): row for row in reversed(of_model)}
        lines.append([_name(key), *(_cell(by_point.get(point), "tokens_per_s") for point in points)])
    header = ["method (placement)", *(f"{decoding}, batch {batch}" for decoding, batch in points)]
    return [f"Tokens/s of all sequences, by decoding ({_rounds(generated)}):\n\n{table(header, lines)}"]


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


def _rounds(rows: list[Record]) -> str:
    """Return the number of rounds that rows summarise, in words."""
    counts = sorted({int(row["rounds"]) for row in rows})
    if counts == [1]:
        return "one round"
    return f"medians of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} rounds"


def _name(key: tuple[str, ...]) -> str:
    method, placement = key
    return f"{method} ({placement})" if placement else method


def _cell(row: Record | None, column: str) -> str:
    if row is None:
        return ""
    return row["status"] if row["status"] != "ok" else short(row[column]) if row[column] else ""
