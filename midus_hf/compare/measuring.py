"""One run from upscaling to its result, and the measurement of the base that runs are compared with."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from midus_hf.compare.commands import Commands
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Measured, Point, Result, read_result, write_result
from midus_hf.compare.runs import Run, window_length
from midus_hf.compare.variants import SHUFFLED, Controls, available_controls, wanted
from midus_hf.compare.workplace import BASE, Workplace, remove_upscaled
from midus_hf.files.locks import alone
from midus_hf.files.whole_files import whole_file
from midus_hf.topics.documents import has_column

Tasks = Mapping[str, Mapping[str, float]]


class Evaluations:
    """Evaluations of a run's models by `midus eval`, each kept as a JSON file in the folder `evaluations` of the run.

    A kept evaluation is used again if its arguments are the same, and if all files that these arguments name, the model's files
    among them, have the same names, sizes and modification times. A model that was trained again or a text that was edited is thus
    measured again. A model that is no local folder, such as one of the Hub, is measured every time.
    """

    def __init__(self, folder: Path, comparison: Comparison, commands: Commands):
        self._folder, self._comparison, self._commands = folder / "evaluations", comparison, commands

    def measure(self, step: str, model: str | Path, *arguments: Any) -> Mapping[str, Any]:
        """Return what `midus eval --json` reports of a model, from a kept file where possible."""
        trust = ["--trust-remote-code"] if self._comparison.trust_remote_code else []
        line = [str(word) for word in (model, "--json", *arguments, *trust)]
        path = self._folder / f"{step}.json"
        request = {"words": line, "files": [_files(Path(word)) for word in line]}
        if os.path.isdir(model) and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["asked"] == request:
                return kept["told"]
        answer = json.loads(self._commands.run(step, "midus eval", *line).output)["models"][0]
        self._folder.mkdir(exist_ok=True)
        with whole_file(path) as written:
            written.write_text(json.dumps({"asked": request, "told": answer}, indent=1), encoding="utf-8")
        return answer

    def tasks(self, step: str, model: str | Path) -> Tasks:
        """Return the metrics of a model by task; empty if the comparison has no tasks."""
        tasks = self._comparison.tasks
        if tasks is None:
            return {}
        arguments: list[Any] = ["--tasks", ",".join(tasks.names)]
        for key in ("data", "include_path", "limit", "num_fewshot"):
            if getattr(tasks, key) is not None:
                arguments += _setting(key, getattr(tasks, key))
        return self.measure(step, model, *arguments)["tasks"]

    def losses(self, step: str, model: str | Path, train: Mapping[str, Any]) -> dict[str, float]:
        """Return the loss of each text in nats per token.

        Texts are read with the column of the corpus, in windows of as many tokens as a sequence of training has.
        """
        losses = {}
        column = train.get("path_column")
        keys = {"sequence_length": window_length(train), "column": train.get("text_column")}
        shared = [word for key, value in keys.items() if value is not None for word in _setting(key, value)]
        for name, path in self._comparison.texts.items():
            arguments = ["--text", path, *shared]
            # As in training, documents with paths are measured one by one, each with the blocks of its path.
            if column is not None and has_column(path, column):
                arguments += _setting("path_column", column)
            answer = self.measure(f"{step}-{name}", model, *arguments)
            losses[name] = math.log(answer["perplexity"]["perplexity"])
        return losses


def _files(path: Path) -> str | None:
    """Return a digest of the names, sizes and modification times of a file or of all files of a folder; None if neither exists."""
    # `os.path` answers False for arguments that no file name can hold, where `Path` may raise.
    files = sorted(path.rglob("*")) if os.path.isdir(path) else [path]
    stats = [(file.relative_to(path), file.stat()) for file in files if os.path.isfile(file)]
    lines = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\0".join(lines).encode()).hexdigest() if lines else None


def measure_base(comparison: Comparison, workplace: Workplace, commands: Commands) -> None:
    """Measure the texts and tasks of the base, and write its result."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    folder = workplace.root / BASE
    evaluations = Evaluations(folder, comparison, commands)
    losses = evaluations.losses("base", comparison.base, comparison.train)
    tasks, request = evaluations.tasks("tasks", comparison.base), base_request(comparison)
    write_result(folder, Result(BASE, {}, 0, [Point(0, 0, None, losses)], tasks=tasks, request=request))


def base_request(comparison: Comparison) -> dict[str, Any]:
    """Return everything that the result of the base depends on, for a comparison resolved by `plan`."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    tasks = None if comparison.tasks is None else dataclasses.asdict(comparison.tasks)
    texts = {
        "eval_text": comparison.texts,
        "sequence_length": window_length(comparison.train),
    }
    return {"base": comparison.base, **texts, "tasks": tasks}


def measure_run(run: Run, comparison: Comparison, workplace: Workplace, commands: Commands) -> None:
    """Upscale, train and measure one run, and write its result; steps that are done already are not repeated."""
    folder, variant = workplace.run_folder(run), run.variant
    trained, tuned_model, shuffled_model = (folder / name for name in ("trained", "tuned", "shuffled"))
    evaluations = Evaluations(folder, comparison, commands)
    model, report = _start(run, comparison, workplace, commands)
    # None where the upscaled model was not verified to compute what the base computes, or nothing was upscaled.
    difference = None if report is None else report["identity"]["max_abs_diff"]
    starts_at_base = None if difference is None else difference == 0.0
    controls: Controls = {}
    is_causal = True
    if variant.upscale is not None:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        is_causal = config["upscale"].get("causal", True)
        if variant.control is None:
            controls = available_controls(config)
    peak_rss_bytes = _train("midus train", run.training_keys(comparison, model, trained), trained, commands)
    events = [json.loads(line) for line in (trained / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    peaks = [event["peak_memory_bytes"] for event in events if "peak_memory_bytes" in event]  # one per resumption
    ended = next(event for event in reversed(events) if "trained_parameters" in event)
    base = read_result(workplace.root / BASE)
    assert base is not None, "the base is measured first"
    tasks_before: Tasks = base.tasks
    upscaled = None
    if report is not None and not starts_at_base:
        upscaled = evaluations.losses("upscaled", model, variant.train)
        tasks_before = evaluations.tasks("tasks-before", model)
    shuffled = saved = tuned = None
    if SHUFFLED in wanted(variant, controls) or variant.fine_tune is not None:
        # The curve is the Trainer's, and what follows is measured by `midus eval`.
        saved = evaluations.losses("saved", trained, variant.train)
    if SHUFFLED in wanted(variant, controls):
        arguments = ["shuffle", trained, "--output", shuffled_model, "--seed", run.seed, "--overwrite"]
        commands.run("shuffle", "upscale", *arguments)
        shuffled = evaluations.losses("shuffled", shuffled_model, variant.train)
        remove_upscaled(shuffled_model)
    tasks = evaluations.tasks("tasks", trained)
    if variant.fine_tune is not None:
        _train("midus sft", run.fine_tuning_keys(trained, tuned_model), tuned_model, commands)
        losses = evaluations.losses("tuned", tuned_model, variant.train)
        tuned = Measured(losses, evaluations.tasks("tasks-tuned", tuned_model))
        if not comparison.keep_models:
            workplace.remove_trained(tuned_model)
    result = Result(
        variant=variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve(events, list(comparison.texts)),
        tasks_before=tasks_before,
        tasks=tasks,
        tuned=tuned,
        upscaled=upscaled,
        shuffled=shuffled,
        saved=saved,
        controls=controls,
        control=variant.control,
        control_of=variant.control_of,
        new_parameters=0 if report is None else report["parameters"]["new"],
        trained_parameters=ended["trained_parameters"],
        starts_at_base=starts_at_base,
        is_causal=is_causal,
        seconds=ended["training_seconds"],
        peak_memory_bytes=max(peaks, default=peak_rss_bytes),
        request=run.request(comparison),
    )
    if not comparison.keep_models:
        (folder / "log.jsonl").write_bytes((trained / "log.jsonl").read_bytes())
    write_result(folder, result)
    if not comparison.keep_models:
        workplace.remove_trained(trained)


def curve(events: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Point]:
    """Return the measurements of a training run, ordered by step; of a step that was measured twice, the last."""
    points: dict[int, Point] = {}
    tokens = 0
    for event in events:
        tokens = event.get("num_input_tokens_seen", tokens)
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:
            step = event["step"]
            # The Trainer logs each text by itself.
            measured = points[step].losses if step in points else {}
            seconds = event["training_seconds"] if step else None
            points[step] = Point(step, tokens if step else 0, seconds, {**measured, **losses})
    return [points[step] for step in sorted(points)]


def _start(
    run: Run, comparison: Comparison, workplace: Workplace, commands: Commands
) -> tuple[str | Path, Mapping[str, Any] | None]:
    """Return the model that training begins with and the report of its upscaling; the report is None if the model is the base."""
    if run.variant.upscale is None:
        return comparison.base, None
    assert run.upscaled_name is not None
    model, report_file = workplace.models / run.upscaled_name, workplace.models / f"{run.upscaled_name}.json"
    workplace.models.mkdir(parents=True, exist_ok=True)
    lock = workplace.models / f".{run.upscaled_name}.lock"
    lock.touch()
    with alone(lock):  # runs that share an upscaled model may be at work at the same time
        if not report_file.is_file():
            request = workplace.models / f"{run.upscaled_name}.yaml"
            request.write_text(yaml.safe_dump(dict(run.variant.upscale)), encoding="utf-8")
            of_files = ["--config", request, "--base", comparison.base, "--output", model]
            report = commands.run("upscale", "upscale", *of_files, "--seed", run.seed, "--overwrite", "--json").output
            request.unlink()
            with whole_file(report_file) as path:
                path.write_text(report, encoding="utf-8")
    return model, json.loads(report_file.read_text(encoding="utf-8"))


def _train(command: str, keys: dict[str, Any], output: Path, commands: Commands) -> int:
    """Train, or resume an interrupted training; return the peak resident memory in bytes, 0 if training was done already."""
    if (output / "config.json").is_file():
        return 0
    if (output / "train_config.yaml").is_file():
        keys = keys | {"resume_from_checkpoint": "auto"}
    step = command.removeprefix("midus ")
    recipe = output.parent / f"{step}.yaml"
    recipe.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return commands.run(step, command, recipe).peak_rss_bytes


def _setting(key: str, value: Any) -> list[str]:
    """Return the arguments that set a key of `midus eval`. JSON is YAML too, so the command reads the value unchanged."""
    return ["--set", f"{key}={json.dumps(value)}"]
