"""Goals of this project for speed, and the newest measurements of each goal."""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.ops.shapes import COMPILED, OURS
from benchmarks.report.rows import Record, groups, having, table
from benchmarks.tracked import threads

# Decodings whose time per token depends on the GPU alone, not on the host.
CAPTURED = ("graph", "compiled")
_ONE_RUN = ("date", "device")
_POINT = ("batch", "accumulation", "length", "new_tokens")
_THREADS = r"\d+ threads?"

# Ratio of two rows of one run, the worst if a goal covers several cases, and the commit; None if not measured.
Measurement = tuple[float, str] | None


@dataclass(frozen=True)
class Goal:
    """A bound that a ratio must reach, if `at_least`, or must not exceed, and the newest ratio."""

    text: str
    backend: str
    bound: float
    at_least: bool
    measured: Measurement


def goals_table(ops: list[Record], models: list[Record]) -> str:
    """Return a table of the measured goals and a list of the others, from the rows of `ops.csv` and `model.csv`.

    Goals that differ in the number of threads alone share a line.
    """
    # Threads, ratio, reached and commit of goals, by their text without threads; bounds, by reason and subject.
    lines: dict[str, list[tuple[str, ...]]] = {}
    unmeasured: dict[str, dict[str, list[str]]] = {}
    backends = {row["backend"] for row in (*ops, *models)}
    for goal in goals(ops, models):
        if goal.measured is None:
            reason = "Not measured (no GPU)" if goal.backend == "cuda" and "cuda" not in backends else "Not measured"
            subject, _, bound = goal.text.partition(": ")
            unmeasured.setdefault(reason, {}).setdefault(subject, []).append(bound)
            continue
        ratio, commit = goal.measured
        reached = (operator.ge if goal.at_least else operator.le)(ratio, goal.bound)
        counted = re.search(_THREADS, goal.text)
        cells = (counted.group() if counted else "", f"{ratio:.2f}", "yes" if reached else "no", commit)
        lines.setdefault(re.sub(_THREADS, "{threads}", goal.text), []).append(cells)
    measured = [_line(*item) for item in lines.items()]
    parts = [table(["goal", "measured", "reached", "commit"], measured)] if measured else []
    for reason, by_subject in unmeasured.items():
        listed = "\n".join(f"- {subject}: {'; '.join(bounds)}" for subject, bounds in by_subject.items())
        parts.append(f"{reason}:\n\n{listed}")
    return "\n\n".join(parts)


def _line(text: str, measured: list[tuple[str, ...]]) -> list[str]:
    """Return the cells of goals that differ in the number of threads alone; cells that are equal for all stand once."""
    threads, ratios, reached, commits = zip(*measured, strict=True)
    return [
        text.replace("{threads}", " and ".join(threads)),
        ", ".join(ratios),
        ", ".join(reached if len(set(reached)) > 1 else reached[:1]),
        ", ".join(dict.fromkeys(commits)),
    ]


def goals(ops: list[Record], models: list[Record]) -> Iterator[Goal]:
    """Yield all goals in the order of the table."""
    ops = having(ops, op="headwise_memory", status="ok")
    for shape, forward in (("llama-3.2-1b", 2.0), ("llama-3.1-8b", 1.8)):
        where = f"H200, HML op of {shape}, 32,768 tokens"
        rows = having(ops, backend="cuda", shape=shape, tokens=32768, dtype="bfloat16")
        for mode, bound in (("forward", forward), ("backward", 2.2)):
            text = f"{where}: {mode} at most {bound} times the roofline"
            yield Goal(text, "cuda", bound, False, _over_roofline(having(rows, provider=OURS, mode=mode)))
        for others, name, bound in ((("naive",), "naive", 10.0), (COMPILED, "the strongest compiled rival", 3.0)):
            text = f"{where}: forward and backward at least {bound:g} times as fast as {name}"
            yield Goal(text, "cuda", bound, True, _speed(having(rows, mode="forward+backward"), others))
    for base, bound in (("llama-3.1-8b", 1.3), ("llama-3.2-1b", 1.25)):
        where, rows = f"H200, {base} with HML", having(models, backend="cuda", base=base)
        text = f"{where}: at least {bound} times the tokens/s of LLaMA-Pro, with a captured or compiled step"
        yield Goal(text, "cuda", bound, True, _generation(rows, CAPTURED))
        text = f"{where}: at least as many tokens/s as with LLaMA-Pro, with `generate`"
        yield Goal(text, "cuda", 1.0, True, _generation(rows, ("eager",)))
        text = f"{where}: a training step takes at most 0.8 of OpT-DeUS's, both top-heavy"
        steps = having(rows, phase="train", placement="top-heavy")
        ours, theirs = (having(steps, method=method) for method in ("midus-hml", "opt-deus"))
        yield Goal(text, "cuda", 0.8, False, _newest_ratio(ours, theirs, "seconds", _POINT, max))
    for count in (1, 2):
        counted = threads(count)
        where = f"CPU, {counted}, HML op of smollm2-135m"
        rows = [row for row in having(ops, backend="cpu", shape="smollm2-135m") if row["machine"].endswith(counted)]
        exact = having(rows, dtype="float32")
        for mode in ("forward", "backward"):
            text = f"{where}, 4,096 tokens: {mode} at least 4 times as fast as naive"
            yield Goal(text, "cpu", 4.0, True, _speed(having(exact, tokens=4096, mode=mode), ("naive",)))
        text = f"{where}, one token: forward at least as fast as PyTorch's operations"
        yield Goal(text, "cpu", 1.0, True, _speed(having(exact, tokens=1, mode="forward"), ("torch",)))
        for mode in ("forward", "backward"):
            text = f"{where}, 4,096 tokens: {mode} in bfloat16 at most 1.5 times as long as in float32"
            ours = having(rows, tokens=4096, provider=OURS, mode=mode)
            half, single = (_of_whole_runs(having(ours, dtype=dtype)) for dtype in ("bfloat16", "float32"))
            yield Goal(text, "cpu", 1.5, False, _newest_ratio(half, single, "median_ms", ("popularity",), max))
    text = "CPU, smollm2-135m with HML: at least as many tokens/s as with LLaMA-Pro"
    rows = having(models, backend="cpu", base="smollm2-135m")
    yield Goal(text, "cpu", 1.0, True, _generation(rows, ("eager",)))


def _over_roofline(rows: list[Record]) -> Measurement:
    """Return the largest ratio to the roofline in the newest run, over popularities."""
    rows = _of_whole_runs([row for row in rows if row["roofline_us"]])
    if not rows:
        return None
    newest = having(rows, date=max(row["date"] for row in rows))
    return max(1e3 * float(row["median_ms"]) / float(row["roofline_us"]) for row in newest), newest[0]["commit"]


def _speed(rows: list[Record], others: tuple[str, ...]) -> Measurement:
    """Return the time of the fastest other provider over ours: the smallest ratio in the newest run, over popularities."""
    of_others = [row for row in rows if row["provider"] in others]
    theirs = [
        min(of_case, key=lambda row: float(row["median_ms"]))
        for of_case in groups(of_others, *_ONE_RUN, "popularity").values()
    ]
    ours = having(rows, provider=OURS)
    return _newest_ratio(_of_whole_runs(theirs), _of_whole_runs(ours), "median_ms", ("popularity",), min)


def _of_whole_runs(rows: list[Record]) -> list[Record]:
    """Return the rows of runs that timed both popularities, since a run of the easier one must not replace a worse result.

    For one token both popularities are the same, so every run counts.
    """
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["date"], set()).add(row["popularity"])
    return [row for row in rows if row["tokens"] == "1" or seen[row["date"]] == {"uniform", "zipf"}]


def _generation(rows: list[Record], decodings: tuple[str, ...]) -> Measurement:
    """Return the tokens/s of HML over the tokens/s of LLaMA-Pro, each with its own placement and its fastest decoding."""
    rows = [row for row in having(rows, phase="generate", batch=1, status="ok") if row["decoding"] in decodings]

    def fastest(**of_model: str) -> list[Record]:
        by_point = groups(having(rows, **of_model), *_ONE_RUN, *_POINT)
        return [max(of_run, key=lambda row: float(row["tokens_per_s"])) for of_run in by_point.values()]

    ours, theirs = fastest(method="midus-hml", placement="distributed"), fastest(method="llama-pro")
    return _newest_ratio(ours, theirs, "tokens_per_s", _POINT, min)


def _newest_ratio(
    above: list[Record],
    below: list[Record],
    column: str,
    point: tuple[str, ...],
    worst: Callable[[list[float]], float],
) -> Measurement:
    """Return the worst ratio of `above` to `below` at equal points in the newest run that has both; None without one."""
    key = (*_ONE_RUN, *point)
    divisors = {tuple(row[name] for name in key): float(row[column]) for row in having(below, status="ok")}
    by_date: dict[str, list[tuple[float, str]]] = {}
    for row in having(above, status="ok"):
        divisor = divisors.get(tuple(row[name] for name in key))
        if divisor is not None:
            by_date.setdefault(row["date"], []).append((float(row[column]) / divisor, row["commit"]))
    if not by_date:
        return None
    ratios = by_date[max(by_date)]
    return worst([ratio for ratio, _ in ratios]), ratios[0][1]
