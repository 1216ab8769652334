"""The runs of a comparison and their processes, several at a time: finished runs are skipped, failures are reported."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from midus_hf.compare.findings import chosen_rate
from midus_hf.compare.one_run import specification
from midus_hf.compare.options import Comparison
from midus_hf.compare.origins import FIXED, Inputs
from midus_hf.compare.runs import Result, Run, base_run, changed_keys, read_result, runs_at, searches_of
from midus_hf.compare.variants import Variant, control_variants
from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import exclusive
from midus_hf.files.secrets import for_record, without_secrets

_SECONDS_BETWEEN_LOOKS = 0.2


def run_all(
    comparison: Comparison, variants: Sequence[Variant], jobs: int = 1, devices: Sequence[str] = ()
) -> dict[str, str]:
    """Do all runs that have no result yet, and return the reasons of failures, by name.

    The base comes first. Then every variant is trained at each of its rates with the first seed, then at the chosen rate with
    the second seed, the third, and so on. Null controls come last, each at the rate of its variant. `jobs` runs work
    at a time and see all GPUs, or one on each of `devices`, numbers of GPUs. Raises a RequestError if the folder has a result of
    another request, or another comparison runs in the same folder.
    """
    places = list(devices) if devices else [None] * jobs
    output = Path(comparison.output_dir)
    refusal = RequestError(
        f"output_dir is {str(output)!r}, in which another comparison runs; expected one at a time. Wait for it, or choose another "
        "output_dir; --jobs does several runs at a time."
    )
    with exclusive(output, refusal):
        inputs = Inputs(comparison)
        check_finished(comparison, variants, inputs)
        failures = _do([base_run(comparison)], comparison, inputs, places)
        if failures:
            return failures
        failures = _do(runs_of(variants, comparison)[0], comparison, inputs, places)
        _, repeats, _ = runs_of(variants, comparison)
        repeats.sort(key=lambda run: comparison.seeds.index(run.seed))
        _check_same(repeats, comparison, inputs)
        failures |= _do(repeats, comparison, inputs, places)
        _, _, controls = runs_of(variants, comparison)
        _check_same(controls, comparison, inputs)
        return failures | _do(controls, comparison, inputs, places)


def check_finished(comparison: Comparison, variants: Sequence[Variant], inputs: Inputs | None) -> None:
    """Raise a RequestError unless results in the output belong to these runs and, with `inputs`, to the same texts and base."""
    _check_same([base_run(comparison), *itertools.chain(*runs_of(variants, comparison))], comparison, inputs)


def runs_of(variants: Sequence[Variant], comparison: Comparison) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the searches of rates, and the runs that follow from finished ones: other seeds and null controls at chosen rates."""
    searches, repeats, controls = list[Run](), list[Run](), list[Run]()
    for variant in variants:
        rate_runs = searches_of(variant, comparison)
        searches += rate_runs
        rate = chosen_rate(_results(rate_runs, comparison), list(comparison.validation))
        if rate is None:
            continue
        (first, *others) = runs_at(rate, variant, comparison)
        repeats += others
        if comparison.controls and variant.upscale is not None:
            (searched,) = _results([first], comparison)
            for control in control_variants(variant, searched.controls, rate):
                controls += runs_at(rate, control, comparison)
    return searches, repeats, controls


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return the result of the base, if there is one, those of searches, repeats and null controls, and the number of runs to do."""
    searches, repeats, controls = runs_of(variants, comparison)
    results = _results([*searches, *repeats, *controls], comparison)
    planned = len(searches) + len(variants) * (len(comparison.seeds) - 1) + len(controls)
    return read_result(base_run(comparison).folder(comparison)), results, planned - len(results)


def _results(runs: Sequence[Run], comparison: Comparison) -> list[Result]:
    return [result for run in runs if (result := read_result(run.folder(comparison))) is not None]


def _do(runs: Sequence[Run], comparison: Comparison, inputs: Inputs, places: Sequence[str | None]) -> dict[str, str]:
    """Do the runs that have no result yet, one at a time on each device, and return the reasons of failures, by name."""
    waiting = deque[Run]()
    for run in runs:
        if read_result(run.folder(comparison)) is None:
            waiting.append(run)
        else:  # a kill between the result and the removal of the models leaves them
            shutil.rmtree(run.folder(comparison), ignore_errors=True)
    free = deque(places)
    working: dict[subprocess.Popen[str], tuple[Run, str | None, float]] = {}
    failures: dict[str, str] = {}
    with tqdm(total=len(waiting), unit=" runs", disable=None if waiting else True) as bar:
        try:
            while waiting or working:
                while waiting and free:
                    run, device = waiting.popleft(), free.popleft()
                    text = specification(run, comparison, inputs.digests_for(run.variant))
                    working[_start(run, comparison, text, device, len(places))] = (run, device, time.monotonic())
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for process in [process for process in working if process.poll() is not None]:
                    run, device, began = working.pop(process)
                    free.append(device)
                    outcome = "done"
                    if process.returncode:
                        failures[run.name] = _last_words(run, comparison, process.returncode)
                        outcome = f"failed: {failures[run.name]}"
                    bar.update()
                    bar.write(f"{run.name}: {outcome} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        finally:
            for process in working:
                process.kill()
            for process in working:
                process.wait()
    return failures


def _start(
    run: Run, comparison: Comparison, text: str, device: str | None, num_places: int
) -> "subprocess.Popen[str]":
    """Start the process of a run, which reads a specification, on one of several devices; its output goes to the run's log."""
    log = run.log(comparison)
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // num_places))
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": threads, **os.environ}
    if device is not None:
        environment = {**environment, "CUDA_VISIBLE_DEVICES": device}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "midus_hf.compare.one_run"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,  # standard output of this process is for the report
            stderr=output,
            text=True,
            start_new_session=True,  # a Ctrl-C reaches only this process, which then ends the others
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text)
    return process


def _last_words(run: Run, comparison: Comparison, status: int) -> str:
    """Return the last line of a run's log, with its exit status."""
    log = run.log(comparison)
    printed = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    return f"{without_secrets(printed[-1]) if printed else 'it printed nothing'} (status {status}; see {log})"


def _check_same(runs: Sequence[Run], comparison: Comparison, inputs: Inputs | None) -> None:
    """Raise a RequestError if a run has a result of another request, or of other texts or another base under the same names."""
    for run in runs:
        before = read_result(run.folder(comparison))
        if before is None:
            continue
        changed = changed_keys(for_record(before.request), run.request(comparison))
        if not changed and inputs is not None:
            now = inputs.digests_for(run.variant)
            changed = [name for kind, name in FIXED.items() if before.origin.get(kind) != now[kind]]
        if changed:
            raise RequestError(
                f"{run.name} was done with another {', '.join(changed)}; expected the same. Give the variant another name, choose "
                f"another output_dir, or remove {run.folder(comparison)}.json."
            )
