"""`python -m midus_hf.compare.one_run`: one run of a comparison in its own process, from upscaling to its result.

The process reads the run from standard input, calls `upscale`, `train` and `evaluate`, and writes one file: the result. An
interrupted run is restarted.
"""

import ctypes
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.compare.options import Comparison
from midus_hf.compare.origins import code, machine
from midus_hf.compare.runs import Point, Result, Run, write_result
from midus_hf.compare.variants import SHUFFLED, Variant, allowed_controls, available_controls
from midus_hf.config.errors import RequestError
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import CERTIFICATE
from midus_hf.sources.names import saved_config

_SET_PARENT_DEATH_SIGNAL = 1
# Keys of `midus train` that are refused for a model without trained memories, and do not change its loss.
_OF_MEMORIES = ("adapters", "base_kl", "frozen", "protect", "sparse_values")
# Keys that the base refuses, since it reads no paths: its texts are concatenated, while a run with paths packs each leaf separately.
_OF_PATHS = ("path_column", "tree")


def specification(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> str:
    """Return a run with its comparison, and the digests of its inputs, as the text that `main` reads."""
    values = {"run": dataclasses.asdict(run), "comparison": dataclasses.asdict(comparison), "inputs": inputs}
    return json.dumps({**values, "parent": os.getpid()})


def main(text: str) -> None:
    """Do the run of a specification, and write its result; exit when the parent process exits."""
    values = json.loads(text)
    _end_with(values["parent"])
    run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
    do(run, from_mapping(Comparison, values["comparison"]), values["inputs"])


def do(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run, with digests from `Inputs`, write its result next to its folder, and remove the folder with its models."""
    result = measure(run, comparison, inputs)
    write_result(run.folder(comparison), result)
    shutil.rmtree(run.folder(comparison), ignore_errors=True)
    return result


def measure(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run as `do` does, and return its result, unwritten; its models, `upscaled` and `trained`, stay in its folder."""
    shutil.rmtree(run.folder(comparison), ignore_errors=True)  # an interrupted run left it
    # Read now: files that change while the run works do not belong to its result.
    request, origin = run.request(comparison), {**inputs, "code": code(), "machine": machine()}
    run.folder(comparison).mkdir(parents=True)
    if run.variant.is_base:
        losses, tasks = _losses(comparison.base, run, comparison), _tasks(comparison.base, comparison)
        result = Result(run.variant.name, {}, 0, [Point(0, losses)], tasks=tasks)
    else:
        result = _trained(run, comparison)
    broken = [name for name, loss in result.losses.items() if not math.isfinite(loss)]
    if broken:
        raise RequestError(
            f"the loss of {broken[0]} did not end at a finite number, but at {result.losses[broken[0]]}."
        )
    return dataclasses.replace(result, request=request, origin=origin)


def _trained(run: Run, comparison: Comparison) -> Result:
    """Upscale and train the model of a run, and return the measurements during training and of the saved model."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import run_training
    from upscalers.edits.checkpoint_edit import shuffle
    from upscalers.runs.upscale import upscale

    folder, variant, model, made = run.folder(comparison), run.variant, comparison.base, dict[str, Any]()
    trained = folder / "trained"
    if variant.upscale is not None:
        model = str(folder / "upscaled")
        report = upscale(base=comparison.base, output=model, seed=run.seed, **variant.upscale)
        difference = report.identity.max_abs_diff
        config = saved_config(model)
        record = record_of(config)
        assert record is not None, "upscale wrote it"
        made = {
            "new_parameters": report.parameters.new,
            "starts_at_base": None if difference is None else difference == 0.0,
            "is_causal": record.causal,
            "controls": {} if variant.control is not None else available_controls(config),
        }
    keys = run.training_keys(comparison, model, trained)
    outcome = run_training(from_mapping(TrainArguments, keys))
    steps = finite_number(keys.get("max_steps", -1))
    if steps is not None and outcome.steps < steps:
        raise RequestError(
            f"training ended after {outcome.steps} of {steps:g} steps: the corpus has fewer sequences than a batch; expected more "
            "text, or a smaller per_device_train_batch_size."
        )
    clear_device_cache(garbage_collection=True)
    if comparison.controls and SHUFFLED in allowed_controls(variant, made.get("controls", {})):
        shuffle(trained, folder / "shuffled", run.seed)
        made["saved"] = _losses(str(trained), run, comparison)
        made["shuffled"] = _losses(str(folder / "shuffled"), run, comparison)
        shutil.rmtree(folder / "shuffled")
    return Result(
        variant=variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve_of(outcome.log, comparison.texts),
        tasks=_tasks(str(trained), comparison),
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


def _losses(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    """Return the loss of each text in nats per token, as measured during training, for a model that is not trained."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import measure_texts

    if not comparison.texts:
        return {}
    output = run.folder(comparison) / "measured"  # which measuring opens, and removes
    left_out = (*_OF_MEMORIES, *_OF_PATHS) if model == comparison.base else _OF_MEMORIES
    keys = {key: value for key, value in run.training_keys(comparison, model, output).items() if key not in left_out}
    losses = measure_texts(from_mapping(TrainArguments, {**keys, "trainable": "all"}))
    clear_device_cache(garbage_collection=True)
    return losses


def _tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of a model by task; empty if the comparison has no tasks."""
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.evaluation.evaluate import evaluate
    from midus_hf.evaluation.settings import EvaluationSettings
    from midus_hf.sources.progress import quiet_libraries

    if comparison.tasks is None:
        return {}
    keys = dataclasses.asdict(comparison.tasks)
    with quiet_libraries():
        (measured,) = evaluate([model], EvaluationSettings(tasks=keys.pop("names"), **keys))["models"]
    clear_device_cache(garbage_collection=True)
    return measured["tasks"]


def _end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, so that a killed comparison leaves no processes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.stdin.read())
