"""Run the cases that the command line asks for."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.device import chosen_device
from benchmarks.ops import peers, providers  # noqa: F401 - fill the table
from benchmarks.ops.bench import Bench, say
from benchmarks.ops.registry import OPS, PROVIDERS
from benchmarks.ops.row import FILE, key_of
from benchmarks.ops.shapes import MODES, POPULARITIES, SHAPES, Case
from benchmarks.profile import FILE as PROFILE_FILE
from benchmarks.profile import kernels
from benchmarks.timing import release_memory
from benchmarks.tracked import Run, resumed, rows_of, this_run
from midus_hf.ops import op_choices

DEFAULT_SHAPES = {"cpu": ["smollm2-135m"], "cuda": ["llama-3.2-1b", "llama-3.1-8b"], "rehearsal": ["tiny"]}
DEFAULT_TOKENS = {"cpu": [4096, 1], "cuda": [32768, 1], "rehearsal": [9, 1]}
DEFAULT_POPULARITIES = {"cpu": list(POPULARITIES), "cuda": list(POPULARITIES), "rehearsal": ["uniform"]}
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
DTYPES = ("float32", "bfloat16", "float16")


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for; returns 1 if a provider was wrong or failed."""
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    _fill_in(arguments, "rehearsal" if arguments.rehearse else device, device)
    cases = list(_cases(arguments, device))
    began = time.perf_counter()
    bench = _bench(arguments, this_run(device))
    if device == "cuda":
        # A profiler leaves something behind that slows every later launch a little: all rows shall have it alike.
        kernels(lambda: None, device)
    chosen = {} if arguments.backend == "auto" else {"backend": arguments.backend}
    with op_choices(**chosen):
        for number, case in enumerate(cases):
            if arguments.budget is not None and time.perf_counter() - began > arguments.budget:
                say(f"out of time; not measured: {', '.join(map(str, cases[number:]))}")
                break
            bench.measure(case)
            release_memory(device)
    for trouble in bench.troubles:
        say(f"FAILED {trouble}")
    return 1 if bench.troubles else 0


def _fill_in(arguments: argparse.Namespace, sizes: str, device: str) -> None:
    """What was not said of cases, by where and how they are run."""
    arguments.shapes = arguments.shapes or DEFAULT_SHAPES[sizes]
    arguments.tokens = arguments.tokens or DEFAULT_TOKENS[sizes]
    arguments.popularity = arguments.popularity or DEFAULT_POPULARITIES[sizes]
    arguments.dtype = arguments.dtype or [DEFAULT_DTYPES[device]]


def _bench(arguments: argparse.Namespace, this: Run) -> Bench:
    """A new run, or with `--resume` the newest one that is like it, with what it wrote and what went wrong in it."""
    is_kept = not arguments.no_append and arguments.backend == "auto"
    for name in ("resume", "profile"):
        if getattr(arguments, name) and not is_kept:
            raise SystemExit(f"--{name} needs rows that are kept; leave out --no-append and --backend.")
    asked = (arguments.results if is_kept else None, arguments.providers, arguments.modes, arguments.seconds)
    profiled = arguments.popularity[0] if arguments.profile else None
    if not arguments.resume:
        return Bench(this, *asked, profiled)
    this = resumed(this, arguments.results / FILE)
    rows = rows_of(this, arguments.results / FILE)
    say(f"goes on with the run of {this.date}, which has {len(rows)} rows" if rows else "no run to go on with")
    there = frozenset(map(key_of, rows))
    subjects = frozenset(row["subject"] for row in rows_of(this, arguments.results / PROFILE_FILE))
    bench = Bench(this, *asked, profiled, there, subjects)
    bench.troubles += [
        f"{' '.join(key_of(row))}: {row['status']} before" for row in rows if row["status"] in ("refused", "failed")
    ]
    return bench


def _cases(arguments: argparse.Namespace, device: str) -> Iterator[Case]:
    """All combinations, the ops that matter most and the many tokens first."""
    ops = _known(arguments.ops or list(OPS), OPS, "op")
    shapes = _known(arguments.shapes, SHAPES, "shape")
    popularities = _known(arguments.popularity, POPULARITIES, "popularity")
    dtypes = _known(arguments.dtype, DTYPES, "dtype")
    _known(arguments.modes, MODES, "mode")
    _known(arguments.providers or [], {name for op in ops for name in PROVIDERS[op]}, "provider")
    for op in ops:
        for tokens in arguments.tokens:
            for shape in shapes:
                for popularity in popularities if tokens > 1 else popularities[:1]:
                    for dtype in dtypes:
                        yield Case(op, SHAPES[shape], tokens, popularity, dtype, device)


def _known(names: list[str], known: Any, what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise SystemExit(f"{what} is {name!r}; expected one of {', '.join(known)}.")
    return names
