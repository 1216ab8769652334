"""Choose rows of results. Compared rows come from one run, the newest run that has all of them."""

import statistics
from collections.abc import Callable, Iterable

from benchmarks.models.points import SUBJECT

Record = dict[str, str]
_MEDIANS = ("seconds", "host_s", "device_s", "launches", "tokens_per_s")
_ONE_POINT = ("date", "device", *SUBJECT)


def having(rows: Iterable[Record], **values: object) -> list[Record]:
    """Return the rows that have the values, compared as text."""
    return [row for row in rows if all(row[name] == str(value) for name, value in values.items())]


def newest(rows: Iterable[Record], *group: str) -> list[Record]:
    """Return the rows of the newest run of each group, in the order of `rows`; columns named in `group` make the groups."""
    rows = list(rows)
    latest: dict[tuple[str, ...], str] = {}
    for row in rows:
        key = tuple(row[name] for name in group)
        latest[key] = max(latest.get(key, ""), row["date"])
    return [row for row in rows if row["date"] == latest[tuple(row[name] for name in group)]]


def groups(rows: Iterable[Record], *columns: str) -> dict[tuple[str, ...], list[Record]]:
    """Group rows by the values of columns, in the order of first occurrence."""
    grouped: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in columns), []).append(row)
    return grouped


def over_rounds(rows: Iterable[Record]) -> list[Record]:
    """Summarise the rounds of a run at each point in one row: medians of measurements, and the largest peak.

    If a round failed or ran out of memory, its row stands for all rounds.
    """
    summed = []
    for of_point in groups(rows, *_ONE_POINT).values():
        trouble = next((row for row in of_point if row["status"] != "ok"), None)
        if trouble is not None:
            summed.append(trouble)
            continue
        row = {**of_point[0], "rounds": str(sum(int(one["rounds"]) for one in of_point))}
        for name in _MEDIANS:
            row[name] = _of_all(of_point, name, statistics.median)
        row["peak_gb"] = _of_all(of_point, "peak_gb", max)
        summed.append(row)
    return summed


def _of_all(rows: list[Record], name: str, over: Callable[[list[float]], float]) -> str:
    values = [row[name] for row in rows if row[name]]
    return values[0] if len(values) == 1 else f"{over(list(map(float, values))):.6g}" if values else ""


def short(value: str) -> str:
    """Round a number to about three digits."""
    number = float(value)
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def table(header: list[str], lines: Iterable[list[str]]) -> str:
    """Return a table in Markdown, with all columns but the first aligned to the right."""
    rows = ["| " + " | ".join(cells) + " |" for cells in (header, *lines)]
    return "\n".join([rows[0], f"|---|{'---:|' * (len(header) - 1)}", *rows[1:]])


def without_empty_columns(header: list[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a header and lines without the columns that are empty in every line; the first column stays."""
    kept = [index for index in range(len(header)) if index == 0 or any(line[index] for line in lines)]
    return [header[index] for index in kept], [[line[index] for index in kept] for line in lines]


def origin(rows: Iterable[Record]) -> str:
    """Return the origin of rows in words: machine and device, commits, days, versions."""
    rows = list(rows)

    def all_of(name: str) -> str:
        return ", ".join(sorted({row[name][:10] if name == "date" else row[name] for row in rows} - {""}))

    machine = all_of("machine") if all_of("device") == "cpu" else f"{all_of('device')} ({all_of('machine')})"
    triton = f", triton {all_of('triton')}" if all_of("backend") == "cuda" else ""
    versions = f"torch {all_of('torch')}{triton}, transformers {all_of('transformers')}"
    return f"{machine}; commit {all_of('commit')}, {all_of('date')}; {versions}"
