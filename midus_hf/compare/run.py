"""One run of a comparison, `python -m midus_hf.compare.run`: its result, and digests of what it reads."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.compare.plan import BASE, SHUFFLED, Comparison, Run, Variant
from midus_hf.config.errors import RequestError
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import TOKENIZER, is_of, read_json
from midus_hf.files.outputs import write_text
from midus_hf.files.secrets import for_record
from midus_hf.sources.names import saved_config
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.checkpoint_edit import shuffle
from upscalers.runs.upscale import upscale

# Refused for a model without trained memories; they do not change its loss.
_MEMORY_KEYS = ("adapters", "base_kl", "frozen", "protect", "sparse_values")
# The base reads no paths and refuses them; its texts are concatenated, while a run with paths packs each leaf separately.
_PATH_KEYS = ("path_column", "tree")


@dataclasses.dataclass(frozen=True)
class Point:
    """Losses of the texts, in nats per token by name, after `step` steps of training."""

    step: int
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run, or of the base, whose curve is a point; losses are of packed sequences.

    Args:
        tasks: Metrics of the trained model by task and name.
        shuffled: Losses after the rows of the trained model's value tables were permuted; `saved`: those before.
        control: Name of a null control; `control_of`: its variant.
        starts_at_base: Whether the upscaled model was verified to compute the same as the base; None if nothing was.
        is_causal: Whether every token is computed without later tokens.
        tokens: Number of tokens that it trained on, in `seconds`.
        peak_memory_bytes: What PyTorch allocated on a GPU, else the process's resident memory, until the end of training.
        request: All keys that the result depends on.
        origin: Digests of `data` and `base`, and the version and commit of the `code`.
    """

    variant: str
    rate: Mapping[str, float]
    seed: int
    curve: list[Point]
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    shuffled: Mapping[str, float] | None = None
    saved: Mapping[str, float] | None = None
    control: str | None = None
    control_of: str | None = None
    new_parameters: int = 0
    trained_parameters: int = 0
    tokens: int = 0
    starts_at_base: bool | None = None
    is_causal: bool = True
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def starts_elsewhere(self) -> bool:
        return self.request.get("upscale") is not None and not self.starts_at_base

    @property
    def start(self) -> Point:
        return self.curve[0]

    @property
    def losses(self) -> Mapping[str, float]:
        return self.curve[-1].losses if self.curve else {}


def read_result(folder: Path) -> Result | None:
    """Return the result of the run with a folder, `FOLDER.json`; None if there is none."""
    path = folder.with_name(f"{folder.name}.json")
    if not path.is_file():
        return None
    values = read_json(path)
    values["curve"] = [Point(point["step"], point["losses"]) for point in values["curve"]]
    known = {field.name for field in dataclasses.fields(Result)}  # older results, and their points, have more
    return Result(**{name: value for name, value in values.items() if name in known})


def write_result(folder: Path, result: Result) -> None:
    """Write the result of a run next to its folder, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_text(folder.with_name(f"{folder.name}.json"), json.dumps(dataclasses.asdict(result), indent=1))


def window_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run with these training keys reads texts: tokens per window, and text and path columns."""
    length = finite_number(train.get("sequence_length", TrainArguments.sequence_length))
    return {
        "sequence_length": TrainArguments.sequence_length if length is None else int(length),
        "column": train.get("text_column") or "text",
        "path_column": train.get("path_column"),
    }


def request_of(run: Run, comparison: Comparison) -> dict[str, Any]:
    """Return everything that a run's result depends on, as JSON and `for_record` show it."""
    values = {
        "base": comparison.base,
        "upscale": run.variant.upscale,
        "train": None if run.variant.name == BASE else run.training_keys(comparison, "", Path()),
        "texts": comparison.texts,
        "windows": window_keys(run.variant.train),
        "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
    }
    return for_record(json.loads(json.dumps(values)))


def input_hasher(comparison: Comparison) -> Callable[[Variant], dict[str, str]]:
    """Return a function from a variant of a plan to its digests `data` and `base`, 64 hex digits each.

    `data` covers the corpus, all measured texts and tasks' questions; of datasets on the Hub, only the name. Each file is read once.
    """
    read_text, read_base = functools.cache(hash_text), functools.cache(hash_base)
    questions = [comparison.tasks.data] if comparison.tasks is not None and comparison.tasks.data else []

    def digests_for(variant: Variant) -> dict[str, str]:
        digests = map(read_text, [*variant.corpora, *comparison.texts.values(), *questions])
        return {"data": hashlib.sha256("\n".join(digests).encode()).hexdigest(), "base": read_base(comparison.base)}

    return digests_for


def hash_text(path: str) -> str:
    """Return the SHA-256 of a file, of a folder's sorted files, or of a name that is not a path."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return hashlib.sha256(path.encode()).hexdigest()
    return _hash_files(folder, [folder] if folder.is_file() else folder.rglob("*"))


def hash_base(base: str) -> str:
    """Return the SHA-256 of a base's weights, config and tokenizer, fetched if it is on the Hub."""
    with resolve_source(base) as source:
        files = source.folder.iterdir()
        read = [each for each in files if each.suffix == ".safetensors" or is_of(each.name, TOKENIZER)]
        return _hash_files(source.folder, [*read, source.folder / "config.json"])


def _hash_files(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        name = file.relative_to(root).as_posix() if file != root else ""
        digest.update(f"{name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def code_version() -> str:
    """Return the version and, in a clone, the commit, with `-dirty` if a file was changed."""
    root, described = Path(__file__).parents[2], ""
    if (root / ".git").exists():
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # git is not installed, or knows no commit
            described = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return f"{__version__} ({described})" if described else __version__


def main(text: str) -> None:
    """Do the run given as text, write its result next to its folder, and remove the folder."""
    values = json.loads(text)
    run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
    comparison = from_mapping(Comparison, values["comparison"])
    folder = run.folder(comparison)
    write_result(folder, measure(run, comparison, values["inputs"]))
    shutil.rmtree(folder, ignore_errors=True)


def measure(run: Run, comparison: Comparison, inputs: Mapping[str, str]) -> Result:
    """Do a run with its digests of `input_hasher`; return its result, leaving models in its folder."""
    shutil.rmtree(run.folder(comparison), ignore_errors=True)  # an interrupted run left it
    # Read now: files that change during the run do not belong to its result.
    request, origin = request_of(run, comparison), {**inputs, "code": code_version()}
    run.folder(comparison).mkdir(parents=True)
    if run.variant.name == BASE:
        losses, tasks = _measure_texts(comparison.base, run, comparison), _measure_tasks(comparison.base, comparison)
        result = Result(BASE, {}, 0, [Point(0, losses)], tasks=tasks)
    else:
        result = _train(run, comparison)
    if not all(map(math.isfinite, result.losses.values())):
        raise RequestError(f"losses ended at {dict(result.losses)}; expected finite numbers. Lower the rate.")
    return dataclasses.replace(result, request=request, origin=origin)


def _train(run: Run, comparison: Comparison) -> Result:
    from midus_hf.training.run import run_training

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
        **made,
    )


def curve_of(log: Iterable[Mapping[str, Any]], texts: Iterable[str]) -> list[Point]:
    """Return the losses of texts by name in a Trainer's log."""
    curve: dict[int, dict[str, float]] = {}
    for event in log:
        losses = {name: event[f"eval_{name}_loss"] for name in texts if f"eval_{name}_loss" in event}
        if losses:
            curve.setdefault(event["step"], {}).update(losses)
    return [Point(step, curve[step]) for step in sorted(curve)]


def _measure_texts(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.training.run import measure_texts

    if not comparison.texts:
        return {}
    clear_device_cache(garbage_collection=True)
    output = run.folder(comparison) / "measured"  # which measuring opens, and removes
    left_out = (*_MEMORY_KEYS, *_PATH_KEYS) if model == comparison.base else _MEMORY_KEYS
    keys = {key: value for key, value in run.training_keys(comparison, model, output).items() if key not in left_out}
    return measure_texts(from_mapping(TrainArguments, {**keys, "trainable": "all"}))


def _measure_tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    from accelerate.utils.memory import clear_device_cache

    from midus_hf.evaluation.evaluate import EvaluationSettings, evaluate
    from midus_hf.sources.progress import quiet_libraries

    if comparison.tasks is None:
        return {}
    clear_device_cache(garbage_collection=True)
    keys = dataclasses.asdict(comparison.tasks)
    with quiet_libraries():
        (measured,) = evaluate([model], EvaluationSettings(tasks=keys.pop("names"), **keys))["models"]
    return measured["tasks"]


if __name__ == "__main__":
    main(sys.stdin.read())
