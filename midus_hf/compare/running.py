"""The runs of a comparison and their processes, several at a time: finished runs are skipped, failures are reported."""

import contextlib
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
from midus_hf.compare.options import Comparison, Rate
from midus_hf.compare.origins import FIXED, Inputs
from midus_hf.compare.results import Result, log_file, read_result
from midus_hf.compare.runs import Run, base_run, changed_keys, runs_at, searches_of
from midus_hf.compare.variants import Variant, control_variants
from midus_hf.files.outputs import alone_in
from midus_hf.files.secrets import for_record, without_secrets

_SECONDS_BETWEEN_LOOKS = 0.2


def run_all(
    comparison: Comparison, variants: Sequence[Variant], jobs: int = 1, devices: Sequence[str] = ()
) -> dict[str, str]:
    """Do all runs that have no result yet, and return why runs failed, by name.

    The base comes first. Then every variant is trained at each of its rates with the first seed, then at the rate that these runs
    choose with the second seed, the third, and so on. Null controls come last, each at the rate of its variant.

    Args:
        comparison: The comparison, resolved by `plan`.
        variants: Variants that `plan` returned.
        jobs: Number of runs at a time, if there are no `devices`. Default: 1.
        devices: Numbers of GPUs. Each run gets one GPU, and one run per GPU works at a time. Default: empty, every run sees all GPUs.

    Raises:
        ValueError: If the folder has a result of another request, or another comparison runs in the same folder.
    """
    places = list(devices) if devices else [None] * jobs
    output = Path(comparison.output_dir)
    refusal = ValueError(
        f"output_dir is {str(output)!r}, in which another comparison runs; expected one at a time. Wait for it, or choose another "
        "output_dir; --jobs does several runs at a time."
    )
    with alone_in(output, refusal):
        inputs = Inputs(comparison)
        check_finished(comparison, variants, inputs)
        base = base_run(comparison)
        searches = [run for variant in variants for run in searches_of(variant, comparison)]
        failures = _do([base], comparison, inputs, places)
        if failures:
            return failures
        failures = _do(searches, comparison, inputs, places)
        repeats = [run for variant in variants for run in repeats_of(variant, comparison)]
        repeats.sort(key=lambda run: comparison.seeds.index(run.seed))
        _check_same(repeats, comparison, inputs)
        failures |= _do(repeats, comparison, inputs, places)
        controls = [run for variant in variants for run in control_runs(variant, comparison)]
        _check_same(controls, comparison, inputs)
        return failures | _do(controls, comparison, inputs, places)


def check_finished(comparison: Comparison, variants: Sequence[Variant], inputs: Inputs | None) -> None:
    """Check that results in the output belong to these runs and, if `inputs` are given, to the same texts and base.

    Raises:
        ValueError: If the folder has a result of another request.
    """
    searches = [run for variant in variants for run in searches_of(variant, comparison)]
    _check_same([base_run(comparison), *searches, *_later_runs(variants, comparison)], comparison, inputs)


def rate_of(variant: Variant, comparison: Comparison) -> Rate | None:
    """Return the rate that the finished searches of a variant choose; None before one ended at a finite number."""
    return chosen_rate(_results(searches_of(variant, comparison), comparison), list(comparison.validation))


def repeats_of(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs of a variant with all seeds but the first, at its chosen rate; none before there is one."""
    rate = rate_of(variant, comparison)
    return [] if rate is None else runs_at(rate, variant, comparison)[1:]


def control_runs(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs of a variant's null controls, at its chosen rate; none before there is one."""
    rate = rate_of(variant, comparison)
    if rate is None or not comparison.controls or variant.upscale is None:
        return []
    (searched, *_) = _results(runs_at(rate, variant, comparison), comparison)
    controls = control_variants(variant, searched.controls, rate)
    return [run for control in controls for run in runs_at(rate, control, comparison)]


def _later_runs(variants: Sequence[Variant], comparison: Comparison) -> list[Run]:
    """Return the runs that follow from the finished searches: other seeds at the chosen rates, and null controls."""
    runs = [[*repeats_of(variant, comparison), *control_runs(variant, comparison)] for variant in variants]
    return [run for of_variant in runs for run in of_variant]


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return the result of the base, if there is one, the results of all runs that count, and the number of runs to do.

    What counts are the searches, and at each chosen rate the other seeds and the null controls.
    """
    searches = [run for variant in variants for run in searches_of(variant, comparison)]
    results = _results([*searches, *_later_runs(variants, comparison)], comparison)
    controls = sum(len(control_runs(variant, comparison)) for variant in variants)
    planned = len(searches) + len(variants) * (len(comparison.seeds) - 1) + controls
    return read_result(base_run(comparison).folder(comparison)), results, planned - len(results)


def _results(runs: Sequence[Run], comparison: Comparison) -> list[Result]:
    return [result for run in runs if (result := read_result(run.folder(comparison))) is not None]


def _do(runs: Sequence[Run], comparison: Comparison, inputs: Inputs, places: Sequence[str | None]) -> dict[str, str]:
    """Do the runs that have no result yet, one at a time on each device, and return why runs failed, by name."""
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
                    text = specification(run, comparison, inputs.of(run.variant))
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
    """Start the process of a run, which reads a specification, on one of several places; what it prints goes to the run's log."""
    log = log_file(run.folder(comparison))
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
            start_new_session=True,  # a Ctrl-C reaches this process alone, which then ends the others
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text)
    return process


def _last_words(run: Run, comparison: Comparison, status: int) -> str:
    """Return the last line of a run's log, with its exit status."""
    log = log_file(run.folder(comparison))
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    printed = [without_secrets(line.strip()) for line in lines if line.strip()]
    return f"{printed[-1] if printed else 'it said nothing'} (status {status}; see {log})"


def _check_same(runs: Sequence[Run], comparison: Comparison, inputs: Inputs | None) -> None:
    """Raise a ValueError if a run has a result of another request, or of other texts or another base under the same names."""
    for run in runs:
        before = read_result(run.folder(comparison))
        if before is None:
            continue
        changed = changed_keys(for_record(before.request), run.request(comparison))
        if not changed and inputs is not None:
            now = inputs.of(run.variant)
            changed = [name for kind, name in FIXED.items() if before.origin.get(kind) != now[kind]]
        if changed:
            raise ValueError(
                f"{run.name} was done with another {', '.join(changed)}; expected the same. Give the variant another name, choose "
                f"another output_dir, or remove {run.folder(comparison)}.json."
            )
