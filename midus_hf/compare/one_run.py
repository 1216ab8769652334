"""`python -m midus_hf.compare.one_run`: one run of a comparison in its own process, from upscaling to its result.

The process reads the run from standard input, calls `upscale`, `train` and `evaluate`, and writes one file: the result. A run that
was interrupted begins anew.
"""

import ctypes
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.making import free_memory, result_of, taught_model, trained_model, upscaled_model
from midus_hf.compare.options import Comparison
from midus_hf.compare.origins import code, machine
from midus_hf.compare.results import Measured, Point, Result, write_result
from midus_hf.compare.runs import Run
from midus_hf.compare.stages import measure_stages
from midus_hf.compare.variants import SHUFFLED, Variant, available_controls, wanted
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import CERTIFICATE

_SET_PARENT_DEATH_SIGNAL = 1
# Keys of `midus train` that are refused of models without what trains, and change no loss of such a model.
_OF_MEMORIES = ("adapters", "frozen", "protect", "sparse_values")
# Keys that the base refuses, which reads no paths: its texts are packed end to end, while a run with paths packs each leaf by itself.
_OF_PATHS = ("path_column", "tree")


def specification(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> str:
    """Return a run with its comparison, and the digests of what it reads, as the text that `main` reads."""
    values = {"run": dataclasses.asdict(run), "comparison": dataclasses.asdict(comparison), "inputs": inputs}
    return json.dumps({**values, "parent": os.getpid()})


def main(text: str) -> None:
    """Do the run of a specification, and write its result; end at once when the process that wrote the specification ends."""
    values = json.loads(text)
    _end_with(values["parent"])
    run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
    do(run, from_mapping(Comparison, values["comparison"]), values["inputs"])


def do(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run from its beginning, write its result beside its folder, and remove the folder with its models.

    Args:
        run: Run of a variant of the comparison, or of the base.
        comparison: The comparison, resolved by `plan`.
        inputs: Digests of data and base, as `midus_hf.compare.origins.Inputs` returns them.
    """
    result = measure(run, comparison, inputs)
    write_result(run.folder(comparison), result)
    shutil.rmtree(run.folder(comparison), ignore_errors=True)
    return result


def measure(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run from its beginning, and return its result; its models stay in its folder.

    Its models are `upscaled`, `trained` and `tuned`. `do` has the same arguments.
    """
    folder = run.folder(comparison)
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted run left it
    # Read now: files that change while the run works do not belong to its result.
    request, origin = run.request(comparison), {**inputs, "code": code(), "machine": machine()}
    folder.mkdir(parents=True)
    if comparison.stages:
        result = measure_stages(run, comparison, folder)
    elif run.variant.is_base:
        losses, tasks = _losses(comparison.base, run, comparison), _tasks(comparison.base, comparison)
        result = Result(run.variant.name, {}, 0, [Point(0, losses)], tasks=tasks)
    else:
        make = _trained_by_method if run.variant.function is None else _trained_by_function
        result = _measured_afterwards(make(run, comparison, folder), run, comparison, folder)
    broken = [name for name, loss in result.losses.items() if not math.isfinite(loss)]
    if broken:
        raise ValueError(f"the loss of {broken[0]} ended at no finite number, {result.losses[broken[0]]}.")
    return dataclasses.replace(result, request=request, origin=origin)


def _trained_by_method(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Upscale and train the model of a run, and return what was measured until the end of training."""
    variant, model, measured = run.variant, comparison.base, dict[str, Any]()
    if variant.upscale is not None:
        model = str(folder / "upscaled")
        config, measured = upscaled_model(comparison.base, folder / "upscaled", run.seed, variant.upscale)
        measured["controls"] = {} if variant.control is not None else available_controls(config)
    trained = trained_model(run.training_keys(comparison, model, folder / "trained"))
    return result_of(run, _curve(trained.events, list(comparison.texts)), [trained], **measured)


def _trained_by_function(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Let the function of a variant make the model of a run, and return what is measured of the base and of this model."""
    variant = run.variant
    keys = {**variant.train, **run.rate}
    taught = taught_model(variant, comparison.base, folder / "trained", run.seed, keys)
    points = []
    if comparison.texts:
        start = _losses(comparison.base, run, comparison)
        end = _losses(str(folder / "trained"), run, comparison)
        steps = finite_number(variant.train.get("max_steps")) or 1
        points = [Point(0, start), Point(int(steps), end)]
    return result_of(run, points, [taught])


def _measured_afterwards(result: Result, run: Run, comparison: Comparison, folder: Path) -> Result:
    """Return the result of a run with what is measured of its saved models: tasks, losses after shuffling and after fine-tuning."""
    from upscalers.edits.shuffling import shuffle

    trained = str(folder / "trained")
    is_certified = (folder / "trained" / CERTIFICATE).is_file()
    measured: dict[str, Any] = {"tasks": _tasks(trained, comparison), "is_certified": is_certified}
    if comparison.controls and SHUFFLED in wanted(run.variant, result.controls):
        shuffle(trained, folder / "shuffled", run.seed)
        measured["saved"] = _losses(trained, run, comparison)
        measured["shuffled"] = _losses(str(folder / "shuffled"), run, comparison)
        shutil.rmtree(folder / "shuffled")
    if run.variant.fine_tune is not None:
        from midus_hf.training.sft.arguments import SftArguments  # needs trl, which is an extra
        from midus_hf.training.sft.run import finetune

        tuned = folder / "tuned"
        finetune(from_mapping(SftArguments, run.fine_tuning_keys(trained, tuned)))
        free_memory()
        measured["tuned"] = Measured(_losses(str(tuned), run, comparison), _tasks(str(tuned), comparison))
    return dataclasses.replace(result, **measured)


def _losses(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    """Return the loss of each text in nats per token, as a run measures it while it trains, of a model that is not trained."""
    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import TrainingRun

    if not comparison.texts:
        return {}
    output = run.folder(comparison) / "measured"  # which measuring opens, and removes
    left_out = (*_OF_MEMORIES, *_OF_PATHS) if model == comparison.base else _OF_MEMORIES
    keys = {key: value for key, value in run.training_keys(comparison, model, output).items() if key not in left_out}
    losses = TrainingRun(from_mapping(TrainArguments, {**keys, "trainable": "all"})).measure()
    free_memory()
    return losses


def _tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of a model by task; empty if the comparison has no tasks."""
    from midus_hf.evaluation.evaluate import evaluate
    from midus_hf.evaluation.quiet import quiet_libraries
    from midus_hf.evaluation.settings import EvaluationSettings

    if comparison.tasks is None:
        return {}
    keys = dataclasses.asdict(comparison.tasks)
    with quiet_libraries():
        (measured,) = evaluate([model], EvaluationSettings(tasks=keys.pop("names"), **keys))["models"]
    free_memory()
    return measured["tasks"]


def _curve(events: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Point]:
    """Return the measurements in the events of a training log, ordered by step."""
    points: dict[int, dict[str, float]] = {}
    for event in events:
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:  # the Trainer logs each text by itself
            points.setdefault(event["step"], {}).update(losses)
    return [Point(step, points[step]) for step in sorted(points)]


def _end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, so that a comparison that is killed leaves nothing behind.

    Elsewhere the process goes on to its end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.stdin.read())
