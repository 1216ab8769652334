"""The runs of a comparison, one after another, each in its own process: `python -m midus_hf.compare.running` does one.

A run is locked while a process does it, so that the same command, started again elsewhere, takes the runs that no other has taken.
"""

import dataclasses
import fcntl
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.compare.findings import chosen_rate
from midus_hf.compare.options import Comparison
from midus_hf.compare.plan import SHUFFLED, control_variants
from midus_hf.compare.runs import (
    Inputs,
    Point,
    Result,
    Run,
    Variant,
    base_run,
    code_version,
    searches_of,
    write_result,
)
from midus_hf.config.errors import RequestError
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import CERTIFICATE
from midus_hf.files.secrets import for_record, without_secrets
from midus_hf.sources.names import saved_config

_SECONDS_BETWEEN_LOOKS = 1.0  # at runs of other processes
# Digests that a result must share with the comparison that continues it, in words.
_FIXED = {"data": "content of the corpus or of a text", "base": "content of the base"}
# Keys of `midus train` that are refused for a model without trained memories, and do not change its loss.
_MEMORY_KEYS = ("adapters", "base_kl", "frozen", "protect", "sparse_values")
# Keys that the base refuses, since it reads no paths: its texts are concatenated, while a run with paths packs each leaf separately.
_PATH_KEYS = ("path_column", "tree")


def run_all(comparison: Comparison, variants: Sequence[Variant]) -> dict[str, str]:
    """Do all runs that have no result yet, and return the reasons of failures, by name.

    The base comes first. Then every variant is trained at each of its rates with the first seed, then at the chosen rate with
    the second seed, the third, and so on. Null controls come last, each at the rate of its variant. Runs of other processes are
    waited for. Raises a RequestError if the folder has a result of another request.
    """
    inputs, failures, is_waiting = Inputs(comparison), dict[str, str](), False
    while pending := _pending_runs(comparison, variants, inputs, failures):
        is_free = any(_start(run, comparison, inputs, failures) for run in pending)
        if not is_free:
            if not is_waiting:
                print(f"waiting for runs of other processes, such as {pending[0].name}", file=sys.stderr)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        is_waiting = not is_free
    return failures


def _pending_runs(
    comparison: Comparison, variants: Sequence[Variant], inputs: Inputs, failures: Mapping[str, str]
) -> list[Run]:
    """Return the runs that can be done now: the base, else searches of rates, else the runs that follow from these."""
    check_finished(comparison, variants, inputs)
    searches, repeats, controls = runs_of(variants, comparison)
    for runs in ([base_run(comparison)], searches, [*repeats, *controls]):
        pending = [run for run in runs if run.name not in failures and run.result(comparison) is None]
        if pending or "base" in failures:
            return pending
    return []


def _start(run: Run, comparison: Comparison, inputs: Inputs, failures: dict[str, str]) -> bool:
    """Do a run in a process of its own, print how it ended, and add the reason if it failed; return False if another does it.

    The process writes to the log of the run, which both processes lock.
    """
    folder, began, outcome = run.folder(comparison), time.monotonic(), "done"
    folder.parent.mkdir(parents=True, exist_ok=True)
    values = {"run": dataclasses.asdict(run), "comparison": dataclasses.asdict(comparison)}
    with folder.with_name(f"{folder.name}.log").open("a+", encoding="utf-8", errors="replace") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            print(f"{log.name} is not locked: its file system has no locks. Start no second process.", file=sys.stderr)
        if run.result(comparison) is not None:
            return True
        log.truncate(0)
        text = json.dumps({**values, "inputs": inputs.digests_for(run.variant)})
        words = [sys.executable, "-m", "midus_hf.compare.running"]  # standard output is for the report
        status = subprocess.run(words, input=text, stdout=log, stderr=log, text=True, check=False).returncode
        if status:
            log.seek(0)
            why = without_secrets(log.read().strip().split("\n")[-1].strip()) or "it printed nothing"
            failures[run.name] = f"{why} (status {status}; see {log.name})"
            outcome = f"failed: {failures[run.name]}"
    print(f"{run.name}: {outcome} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return True


def runs_of(variants: Sequence[Variant], comparison: Comparison) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the searches of rates, and the runs that follow from finished ones: other seeds and null controls at chosen rates."""
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
    """Return the result of the base, if there is one, those of all other runs, and the number of runs to do."""
    searches, repeats, controls = runs_of(variants, comparison)
    results = _results([*searches, *repeats, *controls], comparison)
    planned = sum(sum(count_runs(variant, comparison)) for variant in variants)
    return base_run(comparison).result(comparison), results, planned - len(results)


def _results(runs: Sequence[Run], comparison: Comparison) -> list[Result]:
    return [result for run in runs if (result := run.result(comparison)) is not None]


def check_finished(comparison: Comparison, variants: Sequence[Variant], inputs: Inputs | None) -> None:
    """Raise a RequestError if a result is of another request or, with `inputs`, of other texts or another base of the same name."""
    searches, repeats, controls = runs_of(variants, comparison)
    for run in [base_run(comparison), *searches, *repeats, *controls]:
        before = run.result(comparison)
        if before is None:
            continue
        request = for_record(before.request)
        changed = [key for key, value in run.request(comparison).items() if request.get(key) != value]
        if not changed and inputs is not None:
            now = inputs.digests_for(run.variant)
            changed = [name for kind, name in _FIXED.items() if before.origin.get(kind) != now[kind]]
        if changed:
            raise RequestError(
                f"{run.name} was done with another {', '.join(changed)}; expected the same. Give the variant another name, choose "
                f"another output_dir, or remove {run.folder(comparison)}.json."
            )


def main(text: str) -> None:
    """Do the run that the process is given as text."""
    values = json.loads(text)
    run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
    execute_run(run, from_mapping(Comparison, values["comparison"]), values["inputs"])


def execute_run(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run, with digests from `Inputs`, write its result next to its folder, and remove the folder with its models."""
    result = measure(run, comparison, inputs)
    write_result(run.folder(comparison), result)
    shutil.rmtree(run.folder(comparison), ignore_errors=True)
    return result


def measure(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run as `execute_run` does, and return its result, unwritten; its models, `upscaled` and `trained`, stay in its folder."""
    shutil.rmtree(run.folder(comparison), ignore_errors=True)  # an interrupted run left it
    # Read now: files that change while the run works do not belong to its result.
    request, origin = run.request(comparison), {**inputs, "code": code_version()}
    run.folder(comparison).mkdir(parents=True)
    if run.variant.is_base:
        losses, tasks = _measure_texts(comparison.base, run, comparison), _measure_tasks(comparison.base, comparison)
        result = Result(run.variant.name, {}, 0, [Point(0, losses)], tasks=tasks)
    else:
        result = _train(run, comparison)
    for name, loss in result.losses.items():
        if not math.isfinite(loss):
            raise RequestError(f"the loss of {name} did not end at a finite number, but at {loss}.")
    return dataclasses.replace(result, request=request, origin=origin)


def _train(run: Run, comparison: Comparison) -> Result:
    """Upscale and train the model of a run, and return the measurements during training and of the saved model."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import run_training
    from upscalers.edits.checkpoint_edit import shuffle
    from upscalers.runs.upscale import upscale

    folder, variant, model, made = run.folder(comparison), run.variant, comparison.base, dict[str, Any]()
    trained, shuffled = folder / "trained", folder / "shuffled"
    if variant.upscale is not None:
        model = str(folder / "upscaled")
        report = upscale(base=comparison.base, output=model, seed=run.seed, **variant.upscale)
        difference, record = report.identity.max_abs_diff, record_of(saved_config(model))
        assert record is not None, "upscale wrote it"
        made = {"new_parameters": report.parameters.new, "is_causal": record.causal}
        made["starts_at_base"] = None if difference is None else difference == 0.0
    keys = run.training_keys(comparison, model, trained)
    outcome = run_training(from_mapping(TrainArguments, keys))
    steps = finite_number(keys.get("max_steps", -1))
    if steps is not None and outcome.steps < steps:
        raise RequestError(
            f"training ended after {outcome.steps} of {steps:g} steps: the corpus has fewer sequences than a batch; expected more "
            "text, or a smaller per_device_train_batch_size."
        )
    clear_device_cache(garbage_collection=True)
    if SHUFFLED in variant.controls:
        shuffle(trained, shuffled, run.seed)
        made["saved"] = _measure_texts(str(trained), run, comparison)
        made["shuffled"] = _measure_texts(str(shuffled), run, comparison)
        shutil.rmtree(shuffled)
    return Result(
        variant=variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve_of(outcome.log, comparison.texts),
        tasks=_measure_tasks(str(trained), comparison),
        control=variant.control,
        control_of=variant.control_of,
        trained_parameters=outcome.log[-1]["trained_parameters"],
        tokens=outcome.tokens,
        seconds=[event["train_runtime"] for event in outcome.log if "train_runtime" in event][-1],
        peak_memory_bytes=outcome.log[-1]["peak_memory_bytes"],
        is_certified=(trained / CERTIFICATE).is_file(),
        **made,
    )


def curve_of(log: Iterable[Mapping[str, Any]], texts: Iterable[str]) -> list[Point]:
    """Return the losses of texts by name in the log of a Trainer, which logs each text by itself."""
    curve: dict[int, dict[str, float]] = {}
    for event in log:
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:
            curve.setdefault(event["step"], {}).update(losses)
    return [Point(step, curve[step]) for step in sorted(curve)]


def _measure_texts(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    """Return the loss of each text in nats per token, as measured during training, for a model that is not trained."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import measure_texts

    if not comparison.texts:
        return {}
    output = run.folder(comparison) / "measured"  # which measuring opens, and removes
    left_out = (*_MEMORY_KEYS, *_PATH_KEYS) if model == comparison.base else _MEMORY_KEYS
    keys = {key: value for key, value in run.training_keys(comparison, model, output).items() if key not in left_out}
    losses = measure_texts(from_mapping(TrainArguments, {**keys, "trainable": "all"}))
    clear_device_cache(garbage_collection=True)
    return losses


def _measure_tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of a model by task; empty if the comparison has no tasks."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.evaluation.evaluate import EvaluationSettings, evaluate
    from midus_hf.sources.progress import quiet_libraries

    if comparison.tasks is None:
        return {}
    keys = dataclasses.asdict(comparison.tasks)
    with quiet_libraries():
        (measured,) = evaluate([model], EvaluationSettings(tasks=keys.pop("names"), **keys))["models"]
    clear_device_cache(garbage_collection=True)
    return measured["tasks"]


if __name__ == "__main__":
    main(sys.stdin.read())
