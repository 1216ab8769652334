"""The runs of a comparison, each a process `python -m midus_hf.compare.run` with a lock, and their results."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.compare.plan import BASE, SHUFFLED, Comparison, Rate, Run, Variant, control_variants, list_searches
from midus_hf.config.errors import RequestError
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.evaluation.evaluate import evaluate
from midus_hf.files.checkpoint_files import CONFIG_FILE, RUN_CONFIG, TOKENIZER, is_of, read_json
from midus_hf.files.outputs import write_text
from midus_hf.files.secrets import for_record, without_secrets
from midus_hf.sources.names import saved_config
from midus_hf.sources.progress import quiet_libraries
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.checkpoint_edit import shuffle
from upscalers.runs.upscale import upscale

InputHasher = Callable[[Variant], dict[str, str]]

# Refused for a model without trained memories (they do not change its loss), and for the base, whose texts are concatenated.
_MEMORY_KEYS = ("adapters", "base_kl", "frozen", "protect", "sparse_values")
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
        measured_rates: Rates that the run found for itself, by key.
        starts_at_base: Whether the upscaled model was verified to compute the same as the base; None if nothing was.
        is_causal: Whether every token is computed without later tokens.
        tokens: Number of tokens that it trained on, in `seconds`.
        peak_memory_bytes: What PyTorch allocated on a GPU, else the process's resident memory, until the end of training.
        request: All keys that the result depends on.
        origin: Digests of `data` and `base`, and the version and commit of the `code`.
    """

    variant: str
    rate: Rate
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
    measured_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
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


def build_request(run: Run, comparison: Comparison) -> dict[str, Any]:
    """Return everything that a run's result depends on, as JSON and `for_record` show it."""
    train = run.variant.train
    length = int(finite_number(train.get("sequence_length")) or TrainArguments.sequence_length)
    column = train.get("text_column") or "text"
    path_column = train.get("path_column")
    values = {
        "base": comparison.base,
        "upscale": run.variant.upscale,
        "train": None if run.variant.name == BASE else run.training_keys(comparison, "", "."),
        "texts": comparison.texts,
        "windows": {"sequence_length": length, "column": column, "path_column": path_column},
        "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
    }
    return for_record(json.loads(json.dumps(values)))


def input_hasher(comparison: Comparison) -> InputHasher:
    """Return a function from a variant of a plan to its digests `data` and `base`, 64 hex digits each.

    `data` covers the corpus, all measured texts and tasks' questions; of datasets on the Hub, only the name. Each file is read once.
    """
    read_text, read_base = functools.cache(hash_text), functools.cache(hash_base)
    questions = [comparison.tasks.data] if comparison.tasks is not None and comparison.tasks.data else []

    def hash_inputs(variant: Variant) -> dict[str, str]:
        digests = map(read_text, [*variant.corpora, *comparison.texts.values(), *questions])
        return {"data": hashlib.sha256("\n".join(digests).encode()).hexdigest(), "base": read_base(comparison.base)}

    return hash_inputs


def hash_text(path: str) -> str:
    """Return the SHA-256 of a file, of a folder's sorted files, or of a name that is not a path."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return hashlib.sha256(path.encode()).hexdigest()
    return _hash_files(folder, folder.rglob("*") if folder.is_dir() else [folder])


def hash_base(base: str) -> str:
    """Return the SHA-256 of a base's weights, config and tokenizer, fetched if it is on the Hub."""
    with resolve_source(base) as source:
        files = source.folder.iterdir()
        read = [each for each in files if each.suffix == ".safetensors" or is_of(each.name, (CONFIG_FILE, *TOKENIZER))]
        return _hash_files(source.folder, read)


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
    root = Path(__file__).parents[2]
    described = ""
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
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted run left it
    # Read now: files that change during the run do not belong to its result.
    request = build_request(run, comparison)
    origin = {**values["inputs"], "code": code_version()}
    folder.mkdir(parents=True)
    if run.variant.name == BASE:
        losses = _measure_texts(comparison.base, run, comparison)
        result = Result(BASE, {}, 0, [Point(0, losses)], tasks=_measure_tasks(comparison.base, comparison))
    else:
        result = _train(run, comparison)
    if not all(map(math.isfinite, result.losses.values())):
        raise RequestError(f"losses ended at {dict(result.losses)}; expected finite numbers. Lower the rate.")
    write_result(folder, dataclasses.replace(result, request=request, origin=origin))
    shutil.rmtree(folder, ignore_errors=True)


def _train(run: Run, comparison: Comparison) -> Result:
    """Upscale, train and measure a run's model; return what was measured."""
    from midus_hf.training.output import rates_in
    from midus_hf.training.run import run_training

    variant = run.variant
    model = comparison.base
    made = dict[str, Any]()
    upscaled, trained, shuffled = (str(run.folder(comparison) / name) for name in ("upscaled", "trained", "shuffled"))
    if variant.upscale is not None:
        model = upscaled
        report = upscale(base=comparison.base, output=model, seed=run.seed, **variant.upscale)
        difference = report.identity.max_abs_diff
        record = record_of(saved_config(model)) or UpscaleRecord()
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
    if None in run.rate.values():
        recorded = rates_in(Path(trained) / RUN_CONFIG)
        made["measured_rates"] = {key: rate for key, rate in recorded.items() if keys.get(key) is None}
    if SHUFFLED in variant.controls:
        shuffle(trained, shuffled, run.seed)
        made["saved"] = _measure_texts(trained, run, comparison)
        made["shuffled"] = _measure_texts(shuffled, run, comparison)
    made |= {key: outcome.log[-1][key] for key in ("trained_parameters", "peak_memory_bytes")}
    made |= {"control": variant.control, "control_of": variant.control_of, "tokens": outcome.tokens}
    made["seconds"] = [event["train_runtime"] for event in outcome.log if "train_runtime" in event][-1]
    made["tasks"] = _measure_tasks(trained, comparison)
    return Result(variant.name, dict(run.rate), run.seed, read_curve(outcome.log, comparison.texts), **made)


def read_curve(log: Iterable[Mapping[str, Any]], texts: Iterable[str]) -> list[Point]:
    """Return the losses of texts by name in a Trainer's log."""
    curve: dict[int, dict[str, float]] = {}
    for event in log:
        for name in texts:
            if (loss := event.get(f"eval_{name}_loss")) is not None:
                curve.setdefault(event["step"], {})[name] = loss
    return [Point(step, curve[step]) for step in sorted(curve)]


def _measure_texts(model: str, run: Run, comparison: Comparison) -> dict[str, float]:
    from midus_hf.training.run import measure_texts

    if not comparison.texts:
        return {}
    clear_device_cache(garbage_collection=True)
    output = str(run.folder(comparison) / "measured")  # which measuring opens, and removes
    left_out = (*_MEMORY_KEYS, *_PATH_KEYS) if model == comparison.base else _MEMORY_KEYS
    keys = {key: value for key, value in run.training_keys(comparison, model, output).items() if key not in left_out}
    return measure_texts(from_mapping(TrainArguments, {**keys, "trainable": "all"}))


def _measure_tasks(model: str, comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    if comparison.tasks is None:
        return {}
    clear_device_cache(garbage_collection=True)
    with quiet_libraries():
        (measured,) = evaluate([model], comparison.tasks.settings())["models"]
    return measured["tasks"]


def mean_loss(losses: Mapping[str, float], texts: Sequence[str]) -> float:
    """Return the mean loss of some texts, in nats per token, unweighted."""
    return statistics.fmean(losses[name] for name in texts)


def chosen_rate(searches: Sequence[Result], validation: Sequence[str]) -> Rate | None:
    """Return the rate with the lowest final validation loss, the first of equals; None without results."""
    best = min(searches, key=lambda one: sum(one.losses[name] for name in validation), default=None)
    return None if best is None else best.rate


def run_all(comparison: Comparison, variants: Sequence[Variant]) -> dict[str, str]:
    """Do all runs that have no result yet, and return the reasons of failures, by name.

    The base comes first; then every variant at each rate with the first seed; then the other seeds, in turn, at the chosen rates;
    then null controls at their variants' rates. Runs of other processes are waited for. A result of another request is refused.
    """
    hash_inputs = input_hasher(comparison)
    failures = dict[str, str]()
    is_free = True
    while True:
        check_finished(comparison, variants, hash_inputs)
        for runs in find_stages(comparison, variants):
            if pending := [run for run in runs if run.name not in failures and not read_results([run], comparison)]:
                break
        if not pending or BASE in failures:
            return failures
        was_free = is_free
        is_free = any(_start(run, comparison, hash_inputs, failures) for run in pending)
        if was_free and not is_free:
            print(f"waiting for runs of other processes, such as {pending[0].name}", file=sys.stderr)
        if not is_free:
            time.sleep(1.0)


def _start(run: Run, comparison: Comparison, hash_inputs: InputHasher, failures: dict[str, str]) -> bool:
    """Do a run in its own process, print how it ended, add a failure's reason; False if another has it."""
    folder = run.folder(comparison)
    began = time.monotonic()
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
        text = json.dumps({**values, "inputs": hash_inputs(run.variant)})
        words = [sys.executable, "-m", "midus_hf.compare.run"]  # standard output is for the report
        status = subprocess.run(words, input=text, stdout=log, stderr=log, text=True, check=False).returncode
        if status:
            log.seek(0)
            why = without_secrets(log.read().strip().split("\n")[-1].strip()) or "it printed nothing"
            failures[run.name] = f"{why} (status {status}; see {log.name})"
    outcome = f"failed: {failures[run.name]}" if run.name in failures else "done"
    print(f"{run.name}: {outcome} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return True


def find_stages(comparison: Comparison, variants: Sequence[Variant]) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the base's run, the searches of rates, and the runs after finished searches: seeds, then null controls."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    base = Run(Variant(BASE, None, comparison.train, []))  # texts are read as all variants read them
    searches = list[Run]()
    repeats = list[Run]()
    controls = list[Run]()
    for variant in variants:
        own = list_searches(variant, comparison)
        searches += own
        if (rate := chosen_rate(read_results(own, comparison), list(comparison.validation))) is not None:
            repeats += [Run(variant, rate, seed) for seed in comparison.seeds[1:]]
            controls += [Run(one, rate, seed) for one in control_variants(variant, rate) for seed in comparison.seeds]
    repeats.sort(key=lambda run: comparison.seeds.index(run.seed))
    return [base], searches, [*repeats, *controls]


def read_results(runs: Iterable[Run], comparison: Comparison) -> list[Result]:
    """Return the results of the runs that are done."""
    read = (read_result(run.folder(comparison)) for run in runs)
    return [result for result in read if result is not None]


def count_runs(variant: Variant, comparison: Comparison) -> tuple[int, int]:
    """Return how many runs a variant takes, and how many its null controls take."""
    controls = sum(name != SHUFFLED for name in variant.controls)
    return len(variant.rates) + len(comparison.seeds) - 1, controls * len(comparison.seeds)


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return the base's result, if any, those of all other runs, and the number of runs to do."""
    base, searches, others = (read_results(runs, comparison) for runs in find_stages(comparison, variants))
    missing = sum(sum(count_runs(variant, comparison)) for variant in variants) - len(searches) - len(others)
    return base[0] if base else None, [*searches, *others], missing


def check_finished(comparison: Comparison, variants: Sequence[Variant], hash_inputs: InputHasher | None) -> None:
    """Refuse results of another request or, with `hash_inputs`, of other texts or another base."""
    for run in (run for runs in find_stages(comparison, variants) for run in runs):
        for result in read_results([run], comparison):
            request = build_request(run, comparison)
            before = for_record(result.request)
            digests = {} if hash_inputs is None else hash_inputs(run.variant)
            # Requests of older versions may have more keys.
            if {key: before.get(key) for key in request} != request or not digests.items() <= result.origin.items():
                raise RequestError(
                    f"{run.folder(comparison)}.json was made with another request, or from other texts or another base; expected "
                    "the same, or another output_dir."
                )


if __name__ == "__main__":
    main(sys.stdin.read())
