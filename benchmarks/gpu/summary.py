"""Summary of all steps on one page, written anew after each step."""

from pathlib import Path

from benchmarks.gpu.steps import Done
from benchmarks.report import sections
from benchmarks.report.rows import Record, groups, short, table
from benchmarks.tracked import read

FILE = "summary.md"
# Number of kernels that are shown per profile.
_HOTTEST = 8


def write_summary(out: Path, done: list[Done], rehearsed: bool = False) -> None:
    """Write `summary.md`.

    Args:
        out: Folder of the CSV files and logs.
        done: Steps that were run. Rows of earlier calls are shown as well.
        rehearsed: Whether the GPU was pretended. Default: False.
    """
    made = sections(out)
    parts = [
        "# Rehearsed without a GPU: no figure here means anything" if rehearsed else "# Measured on a GPU",
        _steps(done),
        *(_end_of_log(one) for one in done if one.status != 0),
        f"## Ceilings\n\n{_ceilings(read(out / 'ceilings.csv'))}",
        f"## Kernels of attention\n\n{_attention(read(out / 'attention_kernels.csv'))}",
        f"## Goals\n\n{made['goals']}",
        f"## Attention over the depth\n\n{made['depth']}",
        f"## Ops\n\n{made['ops']}",
        f"## Models\n\n{made['models']}",
        f"## Kernels\n\n{_profiles(read(out / 'profile.csv'))}",
    ]
    (out / FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _steps(done: list[Done]) -> str:
    lines = []
    for one in done:
        last_line = one.last_lines[-1] if one.last_lines else ""
        lines.append([one.step.name, _ending(one), f"{one.seconds:.0f}", one.step.teaches, last_line])
    return table(["step", "ended", "seconds", "teaches", "last line"], lines)


def _ending(one: Done) -> str:
    if one.status is None:
        return "out of time"
    return "well" if one.status == 0 else f"with status {one.status}"


def _end_of_log(one: Done) -> str:
    return f"The end of what `{one.step.name}` printed:\n\n```\n" + "\n".join(one.last_lines) + "\n```"


def _ceilings(rows: list[Record]) -> str:
    if not rows:
        return "Not measured."
    last = max(row["date"] for row in rows)
    return table(
        ["what", "a second", "device"],
        [[row["what"], f"{float(row['per_second']):.3g}", row["device"]] for row in rows if row["date"] == last],
    )


def _attention(rows: list[Record]) -> str:
    if not rows:
        return "Not tried."
    last = max(row["date"] for row in rows)
    columns = ("case", "expected", "taken", "status", "lse_error", "error")
    return table(list(columns), [[row[name] for name in columns] for row in rows if row["date"] == last])


def _profiles(rows: list[Record]) -> str:
    """Return a table of the slowest kernels of each profile, with their share of the profile's time."""
    if not rows:
        return "Not profiled."
    lines = []
    for (_, subject), of_profile in groups(rows, "benchmark", "subject").items():
        total = sum(float(row["device_us"]) for row in of_profile)
        launches = sum(int(row["launches"]) for row in of_profile)
        lines.append([f"**{subject}**", f"**{launches:,}**", f"**{short(str(total))}**", ""])
        for row in sorted(of_profile, key=lambda row: -float(row["device_us"]))[:_HOTTEST]:
            share = f"{float(row['device_us']) / total:.0%}" if total else ""
            lines.append([f"`{row['kernel'][:80]}`", row["launches"], short(row["device_us"]), share])
    return table(["profile and kernel", "launches", "us", "share"], lines)
