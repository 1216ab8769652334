"""Choosing rows: what is compared comes from one run, and always from the newest that has it."""

from collections.abc import Iterable

Record = dict[str, str]


def having(rows: Iterable[Record], **values: object) -> list[Record]:
    """Rows with these values, compared as text."""
    return [row for row in rows if all(row[name] == str(value) for name, value in values.items())]


def newest(rows: Iterable[Record], *group: str) -> list[Record]:
    """Of each group of rows, by the columns named, those of its newest run; in the order they stand."""
    rows = list(rows)
    latest: dict[tuple[str, ...], str] = {}
    for row in rows:
        key = tuple(row[name] for name in group)
        latest[key] = max(latest.get(key, ""), row["date"])
    return [row for row in rows if row["date"] == latest[tuple(row[name] for name in group)]]


def groups(rows: Iterable[Record], *columns: str) -> dict[tuple[str, ...], list[Record]]:
    """Rows by the values of these columns, in the order in which they first stand."""
    grouped: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in columns), []).append(row)
    return grouped


def short(value: str) -> str:
    """A number with about three digits."""
    number = float(value)
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def table(header: list[str], lines: Iterable[list[str]]) -> str:
    """In Markdown; all columns but the first to the right."""
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def origin(rows: Iterable[Record]) -> str:
    """Where rows come from, in words: device or machine, commits, days, versions."""
    rows = list(rows)

    def all_of(name: str) -> str:
        return ", ".join(sorted({row[name][:10] if name == "date" else row[name] for row in rows} - {""}))

    machine = all_of("machine") if all_of("device") == "cpu" else f"{all_of('device')} ({all_of('machine')})"
    triton = f", triton {all_of('triton')}" if all_of("backend") == "cuda" else ""
    versions = f"torch {all_of('torch')}{triton}, transformers {all_of('transformers')}"
    return f"{machine}; commit {all_of('commit')}, {all_of('date')}; {versions}"
