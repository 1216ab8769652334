"""`python -m midus_hf.compare.one_run`: one run of a comparison in its own process, from upscaling to its result.

The process reads the run from standard input, calls `upscale`, `train` and `evaluate`, and writes one file: the result. A run that
was interrupted begins anew.
"""

import ctypes
import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Measured, Point, Result, read_result, write_result
from midus_hf.compare.runs import Run, base_run, window_keys
from midus_hf.compare.variants import SHUFFLED, Controls, Variant, available_controls, wanted
from midus_hf.config.yaml_options import from_mapping

_SET_PARENT_DEATH_SIGNAL = 1


def specification(run: Run, comparison: Comparison) -> str:
    """Return a run with its comparison as the text that `main` reads."""
    values = {"run": dataclasses.asdict(run), "comparison": dataclasses.asdict(comparison), "parent": os.getpid()}
    return json.dumps(values)


def main(text: str) -> None:
    """Do the run of a specification, and write its result; end at once when the process that wrote the specification ends."""
    values = json.loads(text)
    _end_with(values["parent"])
    run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
    do(run, from_mapping(Comparison, values["comparison"]))


def do(run: Run, comparison: Comparison) -> Result:
    """Do a run from its beginning, write its result beside its folder, and remove the folder unless models are kept."""
    folder = run.folder(comparison)
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted run left it
    if run.variant.is_base:
        losses, tasks = _losses(comparison.base, run, comparison), _tasks(comparison.base, comparison)
        result = Result(run.variant.name, {}, 0, [Point(0, 0, None, losses)], tasks=tasks)
    else:
        folder.mkdir(parents=True)
        result = _measure(run, comparison, folder)
    result = dataclasses.replace(result, request=run.request(comparison))
    write_result(folder, result)
    if not comparison.keep_models:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _measure(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Upscale, train and measure a run; its models are `upscaled`, `trained` and `tuned` in a folder."""
    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import train

    variant = run.variant
    base = read_result(base_run(comparison).folder(comparison))
    assert base is not None, "the base is measured first"
    model, report = comparison.base, None
    starts_at_base: bool | None = None
    is_causal = True
    controls: Controls = {}
    if variant.upscale is not None:
        from upscalers.runs.upscale import upscale

        model = str(folder / "upscaled")
        report = upscale(base=comparison.base, output=model, seed=run.seed, **variant.upscale)
        difference = report.identity.max_abs_diff
        starts_at_base = None if difference is None else difference == 0.0
        config = json.loads((folder / "upscaled" / "config.json").read_text(encoding="utf-8"))
        is_causal = config["upscale"].get("causal", True)
        controls = {} if variant.control is not None else available_controls(config)
    trained = str(folder / "trained")
    outcome = train(from_mapping(TrainArguments, run.training_keys(comparison, model, folder / "trained")))
    events = [json.loads(line) for line in (folder / "trained" / "log.jsonl").read_text("utf-8").splitlines()]
    last = events[-1]
    _free_memory()
    result = Result(
        variant=variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve(events, list(comparison.texts)),
        tasks_before=base.tasks,
        controls=controls,
        control=variant.control,
        control_of=variant.control_of,
        new_parameters=0 if report is None else report.parameters.new,
        trained_parameters=last["trained_parameters"],
        tokens=outcome.tokens,
        starts_at_base=starts_at_base,
        is_causal=is_causal,
        seconds=last["training_seconds"],
        peak_memory_bytes=last["peak_memory_bytes"],
    )
    measured: dict[str, Any] = {"tasks": _tasks(trained, comparison)}
    if report is not None and not starts_at_base:
        measured |= {"upscaled": _losses(model, run, comparison), "tasks_before": _tasks(model, comparison)}
    is_shuffled = SHUFFLED in wanted(variant, controls)
    if is_shuffled or variant.fine_tune is not None:
        measured["saved"] = _losses(trained, run, comparison)  # the curve is the Trainer's; what follows is not
    if is_shuffled:
        measured["shuffled"] = _shuffled_losses(trained, folder / "shuffled", run, comparison)
    if variant.fine_tune is not None:
        measured["tuned"] = _fine_tune(trained, folder / "tuned", run, comparison)
    return dataclasses.replace(result, **measured)


def _shuffled_losses(trained: str, output: Path, run: Run, comparison: Comparison) -> dict[str, float]:
    """Return the losses of a trained model whose rows of values are permuted."""
    from upscalers.edits.shuffling import shuffle

    shuffle(trained, output, run.seed)
    losses = _losses(str(output), run, comparison)
    shutil.rmtree(output)
    return losses


def _fine_tune(trained: str, output: Path, run: Run, comparison: Comparison) -> Measured:
    """Fine-tune a trained model, and measure it again."""
    from midus_hf.training.sft.arguments import SftArguments
    from midus_hf.training.sft.run import prepare

    prepare(from_mapping(SftArguments, run.fine_tuning_keys(trained, output))).execute()
    _free_memory()
    return Measured(_losses(str(output), run, comparison), _tasks(str(output), comparison))


def _losses(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    """Return the loss of each text in nats per token, in windows of as many tokens as a sequence of training has."""
    from midus_hf.topics.documents import has_column

    losses = {}
    for name, path in comparison.texts.items():
        keys = window_keys(run.variant.train)
        # As in training, documents with paths are measured one by one, each with the blocks of its path.
        if keys["path_column"] is not None and not has_column(path, keys["path_column"]):
            keys["path_column"] = None
        losses[name] = math.log(_evaluate(model, comparison, text=path, **keys)["perplexity"]["perplexity"])
    return losses


def _tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of a model by task; empty if the comparison has no tasks."""
    if comparison.tasks is None:
        return {}
    keys = dataclasses.asdict(comparison.tasks)
    return _evaluate(model, comparison, tasks=keys.pop("names"), **keys)["tasks"]


def _evaluate(model: str, comparison: Comparison, **keys: Any) -> dict[str, Any]:
    """Return what `midus eval` reports of a model."""
    from midus_hf.evaluation.evaluate import evaluate
    from midus_hf.evaluation.quiet import quiet_libraries
    from midus_hf.evaluation.settings import EvaluationSettings

    settings = EvaluationSettings(**keys, trust_remote_code=comparison.trust_remote_code)
    with quiet_libraries():
        (measured,) = evaluate([model], settings, quiet=True)["models"]
    _free_memory()
    return measured


def curve(events: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Point]:
    """Return the measurements in the events of a training log, ordered by step."""
    points: dict[int, Point] = {}
    tokens = 0
    for event in events:
        tokens = event.get("num_input_tokens_seen", tokens)
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:
            step = event["step"]
            measured = points[step].losses if step in points else {}  # the Trainer logs each text by itself
            seconds = event["training_seconds"] if step else None
            points[step] = Point(step, tokens if step else 0, seconds, {**measured, **losses})
    return [points[step] for step in sorted(points)]


def _free_memory() -> None:
    """Free the memory of models that were measured, on GPUs too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
