"""Goals of this project for speed, and the newest measurements of each goal."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.ops.names import COMPILED, OURS
from benchmarks.report.rows import Record, groups, having, table
from benchmarks.tracked import threads

# Decodings whose time per token depends on the GPU alone, not on the host.
CAPTURED = ("graph", "compiled")
_ONE_RUN = ("date", "device")


@dataclass(frozen=True)
class Measurement:
    """Ratio of two rows of one run; the worst ratio if a goal covers several cases."""

    ratio: float
    commit: str


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio.

    Args:
        text: The goal in words.
        backend: `"cpu"` or `"cuda"`.
        bound: Bound of the ratio.
        at_least: True if the ratio must reach the bound, False if it must not exceed the bound.
        measure: Returns the newest ratio from the rows of ops and of models, or None if the ratio was not measured.
    """

    text: str
    backend: str
    bound: float
    at_least: bool
    measure: Callable[[list[Record], list[Record]], Measurement | None]


def goals_table(ops: list[Record], models: list[Record]) -> str:
    """Return a table of the measured goals and a list of the others, from the rows of `ops.csv` and `model.csv`.

    Goals that differ in the number of threads alone share a line.
    """
    lines: dict[
        str, list[tuple[str, ...]]
    ] = {}  # threads, ratio, reached, commit of goals, by their text without threads
    backends = {row["backend"] for row in (*ops, *models)}
    unmeasured: dict[str, dict[str, list[str]]] = {}  # bounds, by reason and subject
    for goal in goals():
        measurement = goal.measure(having(ops, backend=goal.backend), having(models, backend=goal.backend))
        if measurement is None:
            reason = "Not measured (no GPU)" if goal.backend == "cuda" and "cuda" not in backends else "Not measured"
            subject, _, bound = goal.text.partition(": ")
            unmeasured.setdefault(reason, {}).setdefault(subject, []).append(bound)
            continue
        reached = (operator.ge if goal.at_least else operator.le)(measurement.ratio, goal.bound)
        counted = re.search(_THREADS, goal.text)
        cells = (counted.group() if counted else "", f"{measurement.ratio:.2f}", "yes" if reached else "no")
        lines.setdefault(re.sub(_THREADS, "{threads}", goal.text), []).append((*cells, measurement.commit))
    parts = (
        [table(["goal", "measured", "reached", "commit"], [_line(*item) for item in lines.items()])] if lines else []
    )
    for reason, by_subject in unmeasured.items():
        listed = "\n".join(f"- {subject}: {'; '.join(bounds)}" for subject, bounds in by_subject.items())
        parts.append(f"{reason}:\n\n{listed}")
    return "\n\n".join(parts)


_THREADS = r"\d+ threads?"


def _line(text: str, measured: list[tuple[str, ...]]) -> list[str]:
    """Return the cells of goals that differ in the number of threads alone; cells that are equal for all stand once."""
    threads, ratios, reached, commits = zip(*measured, strict=True)
    return [
        text.replace("{threads}", " and ".join(threads)),
        ", ".join(ratios),
        ", ".join(reached if len(set(reached)) > 1 else reached[:1]),
        ", ".join(dict.fromkeys(commits)),
    ]


def goals() -> list[Goal]:
    """Return all goals in the order of the table."""
    listed = []
    for shape, forward in (("llama-3.2-1b", 2.0), ("llama-3.1-8b", 1.8)):
        where = f"H200, HML op of {shape}, 32,768 tokens"
        case = {"shape": shape, "tokens": 32768, "dtype": "bfloat16"}
        for mode, bound in (("forward", forward), ("backward", 2.2)):
            listed.append(
                Goal(
                    f"{where}: {mode} at most {bound} times the roofline",
                    "cuda",
                    bound,
                    False,
                    partial(_over_roofline, mode=mode, case=case),
                )
            )
        for others, name, bound in ((("naive",), "naive", 10.0), (COMPILED, "the strongest compiled rival", 3.0)):
            text = f"{where}: forward and backward at least {bound:g} times as fast as {name}"
            listed.append(
                Goal(text, "cuda", bound, True, partial(_op_ratio, mode="forward+backward", others=others, case=case))
            )
    for base, bound in (("llama-3.1-8b", 1.3), ("llama-3.2-1b", 1.25)):
        where = f"H200, {base} with HML"
        text = f"{where}: at least {bound} times the tokens/s of LLaMA-Pro, with a captured or compiled step"
        listed.append(Goal(text, "cuda", bound, True, partial(_generation_ratio, base=base, decodings=CAPTURED)))
        text = f"{where}: at least as many tokens/s as with LLaMA-Pro, with `generate`"
        listed.append(Goal(text, "cuda", 1.0, True, partial(_generation_ratio, base=base, decodings=("eager",))))
        text = f"{where}: a training step takes at most 0.8 of OpT-DeUS's, both top-heavy"
        listed.append(Goal(text, "cuda", 0.8, False, partial(_step_ratio, base=base)))
    listed += [goal for count in (1, 2) for goal in _goals_of_the_op_on_a_cpu(threads(count))]
    text = "CPU, smollm2-135m with HML: at least as many tokens/s as with LLaMA-Pro"
    listed.append(Goal(text, "cpu", 1.0, True, partial(_generation_ratio, base="smollm2-135m", decodings=("eager",))))
    return listed


def _goals_of_the_op_on_a_cpu(counted: str) -> list[Goal]:
    """Return the goals of the HML op on a CPU for one number of threads, such as `"2 threads"`."""
    where, case = f"CPU, {counted}, HML op of smollm2-135m", {"shape": "smollm2-135m", "dtype": "float32"}
    listed = []
    many = partial(_op_ratio, others=("naive",), case={**case, "tokens": 4096}, counted=counted)
    one = partial(_op_ratio, others=("torch",), case={**case, "tokens": 1}, counted=counted)
    for mode in ("forward", "backward"):
        text = f"{where}, 4,096 tokens: {mode} at least 4 times as fast as naive"
        listed.append(Goal(text, "cpu", 4.0, True, partial(many, mode=mode)))
    text = f"{where}, one token: forward at least as fast as PyTorch's operations"
    listed.append(Goal(text, "cpu", 1.0, True, partial(one, mode="forward")))
    for mode in ("forward", "backward"):
        text = f"{where}, 4,096 tokens: {mode} in bfloat16 at most 1.5 times as long as in float32"
        listed.append(Goal(text, "cpu", 1.5, False, partial(_bfloat16_ratio, mode=mode, counted=counted)))
    return listed


def _over_roofline(ops: list[Record], models: list[Record], mode: str, case: dict) -> Measurement | None:
    """Return the largest ratio to the roofline in the newest run, over popularities."""
    rows = having(ops, op="headwise_memory", provider=OURS, mode=mode, status="ok", **case)
    rows = _of_whole_runs([row for row in rows if row["roofline_us"]])
    if not rows:
        return None
    last = max(row["date"] for row in rows)
    ratios = [1e3 * float(row["median_ms"]) / float(row["roofline_us"]) for row in rows if row["date"] == last]
    return Measurement(max(ratios), having(rows, date=last)[0]["commit"])


def _op_ratio(
    ops: list[Record], models: list[Record], mode: str, others: tuple[str, ...], case: dict, counted: str = ""
) -> Measurement | None:
    """Return the time of the fastest other provider over ours: the smallest ratio in the newest run, over popularities."""
    rows = _of_threads(having(ops, op="headwise_memory", mode=mode, status="ok", **case), counted)
    of_others = [row for row in rows if row["provider"] in others]
    theirs = [
        min(of_case, key=lambda row: float(row["median_ms"]))
        for of_case in groups(of_others, *_ONE_RUN, "popularity").values()
    ]
    ours = having(rows, provider=OURS)
    return _newest_ratio(_of_whole_runs(theirs), _of_whole_runs(ours), "median_ms", ("popularity",), min)


def _bfloat16_ratio(ops: list[Record], models: list[Record], mode: str, counted: str) -> Measurement | None:
    """Return our time in bfloat16 over our time in float32: the largest ratio in the newest run, over popularities."""
    case = {"shape": "smollm2-135m", "tokens": 4096, "provider": OURS, "mode": mode, "status": "ok"}
    rows = _of_threads(having(ops, op="headwise_memory", **case), counted)
    half, single = (_of_whole_runs(having(rows, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    return _newest_ratio(half, single, "median_ms", ("popularity",), max)


def _of_threads(rows: list[Record], counted: str) -> list[Record]:
    """Return the rows whose machine's description ends with `counted`, the number of threads in words."""
    return [row for row in rows if row["machine"].endswith(counted)]


def _of_whole_runs(rows: list[Record]) -> list[Record]:
    """Return the rows of runs that timed both popularities, since a run of the easier one must not replace a worse result.

    For one token both popularities are the same, so every run counts.
    """
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["date"], set()).add(row["popularity"])
    return [row for row in rows if row["tokens"] == "1" or seen[row["date"]] == {"uniform", "zipf"}]


def _generation_ratio(
    ops: list[Record], models: list[Record], base: str, decodings: tuple[str, ...]
) -> Measurement | None:
    """Return the tokens/s of HML over the tokens/s of LLaMA-Pro, each with its own placement and its fastest decoding."""
    rows = having(models, base=base, phase="generate", batch=1, status="ok")
    rows = [row for row in rows if row["decoding"] in decodings]
    ours = having(rows, method="midus-hml", placement="distributed")
    theirs = having(rows, method="llama-pro")
    return _newest_ratio(_fastest(ours), _fastest(theirs), "tokens_per_s", _POINT, min)


def _fastest(rows: list[Record]) -> list[Record]:
    """Return the row of most tokens/s of each run and point."""
    return [
        max(of_run, key=lambda row: float(row["tokens_per_s"])) for of_run in groups(rows, *_ONE_RUN, *_POINT).values()
    ]


def _step_ratio(ops: list[Record], models: list[Record], base: str) -> Measurement | None:
    """Return the seconds of a step of HML over the seconds of OpT-DeUS, both top-heavy: the largest ratio over sizes."""
    rows = having(models, base=base, phase="train", placement="top-heavy")
    return _newest_ratio(having(rows, method="midus-hml"), having(rows, method="opt-deus"), "seconds", _POINT, max)


_POINT = ("batch", "accumulation", "length", "new_tokens")


def _newest_ratio(
    above: list[Record],
    below: list[Record],
    column: str,
    point: tuple[str, ...],
    worst: Callable[[list[float]], float],
) -> Measurement | None:
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
    return Measurement(worst([ratio for ratio, _ in ratios]), ratios[0][1])
