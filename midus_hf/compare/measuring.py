"""One run from upscaling to its result, and the measurement of the base that runs are compared with."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from midus_hf.compare.commands import Commands
from midus_hf.compare.evaluations import Evaluations
from midus_hf.compare.null_controls import SHUFFLED, Controls, available_controls, wanted
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Measured, Point, Result, read_result, write_result
from midus_hf.compare.runs import Run
from midus_hf.compare.workplace import BASE, Workplace, remove_upscaled
from midus_hf.files.locks import alone
from midus_hf.files.whole_files import whole_file

Tasks = Mapping[str, Mapping[str, float]]


def measure_base(comparison: Comparison, workplace: Workplace, commands: Commands) -> None:
    """Measure the texts and tasks of the base, and write its result.

    Args:
        comparison: The comparison, resolved by `plan`.
        workplace: Folder of the comparison.
        commands: Runner of the commands.

    Raises:
        StepFailed: If a command fails.
    """
    base, evaluations = comparison.base, Evaluations(workplace.root / BASE, comparison, commands)
    losses = _losses(base, comparison, comparison.train, evaluations, "base")
    tasks = _ask(base, comparison, "tasks", evaluations)
    request = base_request(comparison)
    write_result(workplace.root / BASE, Result(BASE, {}, 0, [Point(0, 0, None, losses)], tasks=tasks, request=request))


def base_request(comparison: Comparison) -> dict[str, Any]:
    """Return everything that the result of the base depends on, for a comparison resolved by `plan`."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    tasks = None if comparison.tasks is None else dataclasses.asdict(comparison.tasks)
    texts = {"eval_text": comparison.texts, "eval_max_tokens": comparison.train.get("eval_max_tokens")}
    return {"base": comparison.base, **texts, "tasks": tasks}


def measure_run(run: Run, comparison: Comparison, workplace: Workplace, commands: Commands) -> None:
    """Upscale, train and measure one run, and write its result; steps that are done already are not repeated.

    Args:
        run: A run of the comparison.
        comparison: The comparison, resolved by `plan`.
        workplace: Folder of the comparison, with the result of the base.
        commands: Runner of the commands.

    Raises:
        StepFailed: If a command fails.
    """
    folder, variant = workplace.run_folder(run), run.variant
    trained = folder / "trained"
    evaluations = Evaluations(folder, comparison, commands)
    model, report = _start(run, comparison, workplace, commands)
    starts_at_base = _starts_at_base(report)
    controls: Controls = {}
    is_causal = True
    if variant.upscale is not None:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        is_causal = config["upscale"].get("causal", True)
        if variant.control is None:
            controls = available_controls(config)
    keys = run.training_keys(comparison, model, trained)
    peak_rss_bytes = _train("midus train", keys, trained, commands)
    events = read_events(trained / "log.jsonl")
    peaks = [event["peak_memory_bytes"] for event in events if "peak_memory_bytes" in event]  # one per resumption
    ended = next(event for event in reversed(events) if "trained_parameters" in event)
    base = read_result(workplace.root / BASE)
    assert base is not None, "the base is measured first"
    tasks_before: Tasks = base.tasks
    if report is not None and not starts_at_base:
        tasks_before = _ask(model, comparison, "tasks-before", evaluations)
    shuffled = unshuffled = None
    if SHUFFLED in wanted(variant, controls):
        # The curve was measured in the precision of training, and the shuffled model is measured in the precision of its file.
        unshuffled = _losses(trained, comparison, variant.train, evaluations, "unshuffled")
        shuffled = _shuffled(run, comparison, trained, commands, evaluations)
    result = Result(
        variant=variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve(events, list(comparison.texts)),
        tasks_before=tasks_before,
        tasks=_ask(trained, comparison, "tasks", evaluations),
        tuned=None
        if variant.fine_tune is None
        else _fine_tune(run, comparison, trained, workplace, commands, evaluations),
        shuffled=shuffled,
        unshuffled=unshuffled,
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
    """Return the measurements of a training run, ordered by step; of a step that was measured twice, the last.

    Args:
        events: Events of the training log, in order.
        texts: Names of the measured texts.
    """
    points: dict[int, Point] = {}
    tokens, seconds = 0, None
    for event in events:
        tokens, seconds = event.get("num_input_tokens_seen", tokens), event.get("training_seconds", seconds)
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:
            step = event["step"]
            points[step] = Point(step, tokens if step else 0, seconds, losses)
    return [points[step] for step in sorted(points)]


def read_events(log: Path) -> list[dict[str, Any]]:
    """Return the events of a finished training run, in order.

    Args:
        log: The log of the training run, a JSON object per line.
    """
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


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
            arguments = [
                "--config",
                request,
                "--base",
                comparison.base,
                "--output",
                model,
                "--seed",
                run.seed,
                "--overwrite",
            ]
            report = commands.run("upscale", "upscale", *arguments, "--json").output
            request.unlink()
            with whole_file(report_file) as path:
                path.write_text(report, encoding="utf-8")
    return model, json.loads(report_file.read_text(encoding="utf-8"))


def _starts_at_base(report: Mapping[str, Any] | None) -> bool | None:
    """Return whether the upscaled model was verified to compute what the base computes; None if not verified or not upscaled."""
    difference = None if report is None else report["identity"]["max_abs_diff"]
    return None if difference is None else difference == 0.0


def _train(command: str, keys: dict[str, Any], output: Path, commands: Commands) -> int:
    """Train, or resume an interrupted training; return the peak resident memory in bytes, 0 if training was done already."""
    if (output / "config.json").is_file():
        return 0
    if (output / "train_config.yaml").is_file():
        keys = {
            **keys,
            **(
                {"resume_from_checkpoint": "auto"}
                if any(output.glob("checkpoint-*"))
                else {"overwrite_output_dir": True}
            ),
        }
    step = command.removeprefix("midus ")
    recipe = output.parent / f"{step}.yaml"
    recipe.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return commands.run(step, command, recipe).peak_rss_bytes


def _fine_tune(
    run: Run, comparison: Comparison, trained: Path, workplace: Workplace, commands: Commands, evaluations: Evaluations
) -> Measured:
    """Fine-tune a trained model, and return its losses and tasks."""
    tuned = trained.parent / "tuned"
    _train("midus sft", run.fine_tuning_keys(trained, tuned), tuned, commands)
    losses = _losses(tuned, comparison, run.variant.train, evaluations, "tuned")
    measured = Measured(losses, _ask(tuned, comparison, "tasks-tuned", evaluations))
    if not comparison.keep_models:
        workplace.remove_trained(tuned)
    return measured


def _ask(model: str | Path, comparison: Comparison, step: str, evaluations: Evaluations) -> Tasks:
    """Return the metrics of a model by task; empty if the comparison has no tasks."""
    tasks = comparison.tasks
    if tasks is None:
        return {}
    arguments: list[Any] = ["--tasks", ",".join(tasks.names)]
    for key in ("data", "include_path", "limit", "num_fewshot"):
        if getattr(tasks, key) is not None:
            arguments += _setting(key, getattr(tasks, key))
    return evaluations.measure(step, model, *arguments)["tasks"]


def _losses(
    model: str | Path, comparison: Comparison, train: Mapping[str, Any] | str, evaluations: Evaluations, step: str
) -> dict[str, float]:
    """Return the loss of each text in nats per token, read with the column and encoding of the first corpus, as in training."""
    losses = {}
    assert isinstance(train, Mapping), "files have been read"
    corpus = train.get("corpus")
    corpus = corpus[0] if isinstance(corpus, list) else corpus
    read_as = corpus if isinstance(corpus, Mapping) else {}
    keys = {
        "max_tokens": train.get("eval_max_tokens"),
        "column": read_as.get("column"),
        "encoding": read_as.get("encoding"),
    }
    shared = [word for key, value in keys.items() if value is not None for word in _setting(key, value)]
    for name, path in comparison.texts.items():
        arguments: list[Any] = ["--text", path, *shared]
        # As in training, documents with paths are measured one by one, each with the blocks of its path.
        if _has_paths(path, read_as):
            arguments += _setting("path_column", read_as["path_column"])
        answer = evaluations.measure(f"{step}-{name}", model, *arguments)
        losses[name] = math.log(answer["perplexity"]["perplexity"])
    return losses


def _setting(key: str, value: Any) -> list[str]:
    """Return the arguments that set a key of `midus eval`. JSON is YAML too, so the command reads the value unchanged."""
    return ["--set", f"{key}={json.dumps(value)}"]


def _has_paths(text: str, corpus: Mapping[str, Any]) -> bool:
    """Return whether a held-out text has the path column that the corpus names."""
    from midus_hf.documents import has_column

    column = corpus.get("path_column")
    return column is not None and has_column(text, column, corpus.get("encoding") or "utf-8")


def _shuffled(
    run: Run, comparison: Comparison, trained: Path, commands: Commands, evaluations: Evaluations
) -> dict[str, float]:
    """Return the losses of a trained model after the rows of its value tables were permuted."""
    shuffled = trained.parent / "shuffled"
    arguments = ["shuffle", trained, "--output", shuffled, "--seed", run.seed, "--overwrite"]
    commands.run("shuffle", "upscale", *arguments)
    losses = _losses(shuffled, comparison, run.variant.train, evaluations, "shuffled")
    remove_upscaled(shuffled)
    return losses
