"""All runs of a comparison, each in its own process, and locked: other commands take other runs."""

import dataclasses
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from midus_hf.compare.findings import chosen_rate
from midus_hf.compare.plan import SHUFFLED, Comparison, Run, Variant, base_run, control_variants, searches_of
from midus_hf.compare.run import Result, input_hasher, read_result, request_of
from midus_hf.config.errors import RequestError
from midus_hf.files.secrets import for_record, without_secrets

_SECONDS_BETWEEN_LOOKS = 1.0  # at runs of other processes

Digests = Callable[[Variant], Mapping[str, str]]


def run_all(comparison: Comparison, variants: Sequence[Variant]) -> dict[str, str]:
    """Do all runs that have no result yet, and return the reasons of failures, by name.

    The base comes first; then every variant at each rate with the first seed; then the other seeds, in turn, at the chosen rates;
    then null controls, each at its variant's rate. Runs of other processes are waited for. Raises a RequestError if the folder has a
    result of another request.
    """
    digests_for, failures, is_waiting = input_hasher(comparison), dict[str, str](), False
    while pending := _pending_runs(comparison, variants, digests_for, failures):
        is_free = any(_start(run, comparison, digests_for, failures) for run in pending)
        if not is_free:
            if not is_waiting:
                print(f"waiting for runs of other processes, such as {pending[0].name}", file=sys.stderr)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        is_waiting = not is_free
    return failures


def _pending_runs(
    comparison: Comparison, variants: Sequence[Variant], digests_for: Digests, failures: Mapping[str, str]
) -> list[Run]:
    """Return the runs possible now: the base, else searches of rates, else the runs that follow."""
    check_finished(comparison, variants, digests_for)
    searches, repeats, controls = runs_of(variants, comparison)
    for runs in ([base_run(comparison)], searches, [*repeats, *controls]):
        pending = [run for run in runs if run.name not in failures and read_result(run.folder(comparison)) is None]
        if pending or "base" in failures:
            return pending
    return []


def _start(run: Run, comparison: Comparison, digests_for: Digests, failures: dict[str, str]) -> bool:
    """Do a run in its own process, print how it ended, add a failure's reason; False if another has it."""
    folder, began, outcome = run.folder(comparison), time.monotonic(), "done"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.log").open("a+", encoding="utf-8", errors="replace") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            print(f"{log.name} is not locked: its file system has no locks. Start no second process.", file=sys.stderr)
        if read_result(folder) is not None:
            return True
        log.truncate(0)
        values = {"run": dataclasses.asdict(run), "comparison": dataclasses.asdict(comparison)}
        text = json.dumps({**values, "inputs": digests_for(run.variant)})
        words = [sys.executable, "-m", "midus_hf.compare.run"]  # standard output is for the report
        status = subprocess.run(words, input=text, stdout=log, stderr=log, text=True, check=False).returncode
        if status:
            log.seek(0)
            why = without_secrets(log.read().strip().split("\n")[-1].strip()) or "it printed nothing"
            failures[run.name] = f"{why} (status {status}; see {log.name})"
            outcome = f"failed: {failures[run.name]}"
    print(f"{run.name}: {outcome} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return True


def runs_of(variants: Sequence[Variant], comparison: Comparison) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the searches of rates, and the runs that follow finished ones: other seeds and null controls."""
    searches, repeats, controls = list[Run](), list[Run](), list[Run]()
    for variant in variants:
        rate_runs = searches_of(variant, comparison)
        searches += rate_runs
        rate = chosen_rate(_results(rate_runs, comparison), list(comparison.validation))
        if rate is not None:
            repeats += [Run(variant, rate, seed) for seed in comparison.seeds[1:]]
            controls += [Run(one, rate, seed) for one in control_variants(variant, rate) for seed in comparison.seeds]
    repeats.sort(key=lambda run: comparison.seeds.index(run.seed))
    return searches, repeats, controls


def count_runs(variant: Variant, comparison: Comparison) -> tuple[int, int]:
    """Return how many runs a variant takes, and how many its null controls take."""
    controls = len(variant.controls) - (SHUFFLED in variant.controls)
    return len(variant.rates) + len(comparison.seeds) - 1, controls * len(comparison.seeds)


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return the base's result, if any, those of all other runs, and the number of runs to do."""
    results = _results([run for runs in runs_of(variants, comparison) for run in runs], comparison)
    planned = sum(sum(count_runs(variant, comparison)) for variant in variants)
    return read_result(base_run(comparison).folder(comparison)), results, planned - len(results)


def _results(runs: Sequence[Run], comparison: Comparison) -> list[Result]:
    return [result for run in runs if (result := read_result(run.folder(comparison))) is not None]


def check_finished(comparison: Comparison, variants: Sequence[Variant], digests_for: Digests | None) -> None:
    """Refuse results of another request or, with `digests_for`, of other texts or another base."""
    for run in [base_run(comparison), *(run for runs in runs_of(variants, comparison) for run in runs)]:
        if (result := read_result(run.folder(comparison))) is None:
            continue
        request, before = request_of(run, comparison), for_record(result.request)
        digests = {} if digests_for is None else digests_for(run.variant)
        # Requests of older versions may have more keys.
        if {key: before.get(key) for key in request} != request or not digests.items() <= result.origin.items():
            raise RequestError(
                f"{run.folder(comparison)}.json was made with another request, or from other texts or another base; expected the "
                "same, or another output_dir."
            )
