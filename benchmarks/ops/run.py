"""Run the cases that the command line names."""

import argparse
from collections.abc import Iterator

from benchmarks.device import chosen_device
from benchmarks.ops import peers, providers  # noqa: F401 - fill the table
from benchmarks.ops.bench import Bench
from benchmarks.ops.registry import OPS, PROVIDERS
from benchmarks.ops.row import FILE
from benchmarks.ops.shapes import MODES, POPULARITIES, SHAPES, Case
from benchmarks.recorded import Recorded, require_known, say
from midus_hf.ops import op_choices

DEFAULT_SHAPES = {"cpu": ["smollm2-135m"], "cuda": ["llama-3.2-1b", "llama-3.1-8b"], "rehearsal": ["tiny"]}
DEFAULT_TOKENS = {"cpu": [4096, 1], "cuda": [32768, 1], "rehearsal": [9, 1]}
DEFAULT_POPULARITIES = {"cpu": list(POPULARITIES), "cuda": list(POPULARITIES), "rehearsal": ["uniform"]}
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
DTYPES = ("float32", "bfloat16", "float16")


def run(arguments: argparse.Namespace) -> int:
    """Measure the cases of the command line, and return 1 if a provider was wrong or failed."""
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    _fill_in(arguments, "rehearsal" if arguments.rehearse else device, device)
    cases = list(_cases(arguments, device))
    bench = _bench(arguments, device)
    chosen = {} if arguments.backend == "auto" else {"backend": arguments.backend}
    with op_choices(**chosen):
        return bench.record.measure_all(cases, bench.measure, arguments.budget)


def _fill_in(arguments: argparse.Namespace, sizes: str, device: str) -> None:
    """Set the sizes that the command line leaves out, by device or for a rehearsal."""
    arguments.shapes = arguments.shapes or DEFAULT_SHAPES[sizes]
    arguments.tokens = arguments.tokens or DEFAULT_TOKENS[sizes]
    arguments.popularity = arguments.popularity or DEFAULT_POPULARITIES[sizes]
    arguments.dtype = arguments.dtype or [DEFAULT_DTYPES[device]]


def _bench(arguments: argparse.Namespace, device: str) -> Bench:
    """Return the bench of a new run, or with `--resume` of the newest run like it, with that run's rows and failures."""
    is_kept = not arguments.no_append and arguments.backend == "auto"
    for name in ("resume", "profile"):
        if getattr(arguments, name) and not is_kept:
            raise SystemExit(f"--{name} needs rows that are kept; leave out --no-append and --backend.")
    record = Recorded.begun(device, arguments.results if is_kept else None, FILE, arguments.resume)
    if arguments.resume:
        count = len(record.before)
        say(f"goes on with the run of {record.run.date}, which has {count} rows" if count else "no run to go on with")
    profiled = arguments.popularity[0] if arguments.profile else None
    return Bench(record, arguments.providers, arguments.modes, arguments.seconds, profiled)


def _cases(arguments: argparse.Namespace, device: str) -> Iterator[Case]:
    """Yield all combinations, in the order of the ops and with many tokens first."""
    ops = arguments.ops or list(OPS)
    require_known(ops, OPS, "op")
    require_known(arguments.shapes, SHAPES, "shape")
    require_known(arguments.popularity, POPULARITIES, "popularity")
    require_known(arguments.dtype, DTYPES, "dtype")
    require_known(arguments.modes, MODES, "mode")
    require_known(arguments.providers, {name for op in ops for name in PROVIDERS[op]}, "provider")
    popularities = arguments.popularity
    for op in ops:
        for tokens in arguments.tokens:
            for shape in arguments.shapes:
                for popularity in popularities if tokens > 1 else popularities[:1]:
                    for dtype in arguments.dtype:
                        yield Case(op, SHAPES[shape], tokens, popularity, dtype, device)
