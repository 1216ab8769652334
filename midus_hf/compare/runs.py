"""A run of a comparison, a variant at one rate with one seed: its keys, its result, and digests of what it reads."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison, Rate, rate_name
from midus_hf.config.errors import RequestError
from midus_hf.config.options import finite_number
from midus_hf.files.checkpoint_files import TOKENIZER, is_of
from midus_hf.files.json_text import read_json
from midus_hf.files.outputs import atomic_write
from midus_hf.files.secrets import for_record
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__

BASE = "base"  # its name among runs: it is measured, and not trained
# Keys of `midus train` whose product is a run's number of sequences, with their defaults.
_SIZES = {"max_steps": -1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of a comparison: keys of `upscale --config`, None if the base itself is trained, and keys of `midus train`.

    The variant named `base` is the base itself, which is only measured. `controls` are the null controls of its memory by name,
    with what each changes. A null control is called `VARIANT+CONTROL`; `control` and `control_of` are its two names.
    `trained_parameters` is None if only training knows.
    """

    name: str
    upscale: Mapping[str, Any] | None
    train: Mapping[str, Any]
    rates: Sequence[Rate]
    new_parameters: int = 0
    trained_parameters: int | None = None
    controls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    control: str | None = None
    control_of: str | None = None

    @property
    def is_base(self) -> bool:
        """True if this is the base, which is measured and not trained."""
        return self.name == BASE

    @property
    def corpora(self) -> list[str]:
        """Corpora that the variant trains on: paths, or ids on the Hub."""
        corpus = self.train.get("corpus") or []
        return [corpus] if isinstance(corpus, str) else list(corpus)

    @property
    def tokens(self) -> int | None:
        """Number of tokens that a run trains on; None if the keys give no number of steps."""
        sizes = [finite_number(self.train.get(name, default)) for name, default in _SIZES.items()]
        known = [size for size in sizes if size is not None and size >= 0]
        length = window_keys(self.train)["sequence_length"]
        return int(math.prod(known)) * length if len(known) == len(sizes) else None


def window_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run with these keys of `midus train` reads texts: tokens per window, and the columns of text and path."""
    length = finite_number(train.get("sequence_length", TrainArguments.sequence_length))
    return {
        "sequence_length": TrainArguments.sequence_length if length is None else int(length),
        "column": train.get("text_column") or "text",
        "path_column": train.get("path_column"),
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a comparison: a variant at one rate, and a seed of new parameters and of the order of texts."""

    variant: Variant
    rate: Rate = dataclasses.field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the run: `VARIANT/RATE/seed-N`, or `base` for the base, which is measured and not trained."""
        name = self.variant.name
        return name if self.variant.is_base else f"{name}/{rate_name(self.rate)}/seed-{self.seed}"

    def folder(self, comparison: Comparison) -> Path:
        """Return the folder of the run's models; its result and its log are `FOLDER.json` and `FOLDER.log`."""
        return Path(comparison.output_dir) / "runs" / self.name

    def result(self, comparison: Comparison) -> "Result | None":
        """Return the result of the run; None if there is none yet."""
        return read_result(self.folder(comparison))

    def training_keys(self, comparison: Comparison, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus train` for this run, which measure texts at the start and the end, or every `eval_steps`."""
        keys = {
            "dataloader_drop_last": True,  # or a smaller batch at the end of a corpus would count as a step
            **self.variant.train,
            **self.rate,
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }
        if not comparison.texts:
            return keys
        # `midus train` itself rejects a value that is no number.
        steps = finite_number(keys.get("max_steps"))
        if keys.get("max_steps") is None or (steps is not None and steps < 1):
            raise RequestError(
                f"variants.{self.variant.name} has max_steps {keys.get('max_steps')}; expected at least 1, the budget that variants "
                "are compared at. Set train.max_steps."
            )
        if keys.get("eval_steps") is None:
            keys["eval_steps"] = 1 if steps is None else int(steps)
        return {**keys, "eval_text": comparison.texts, "eval_on_start": True}

    def request(self, comparison: Comparison) -> dict[str, Any]:
        """Return everything that the result of the run depends on, as JSON holds it and `for_record` shows it."""
        values = {
            "base": comparison.base,
            "upscale": self.variant.upscale,
            "train": None if self.variant.is_base else self.training_keys(comparison, "", Path()),
            "texts": comparison.texts,
            "windows": window_keys(self.variant.train),
            "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
        }
        return for_record(json.loads(json.dumps(values)))


def base_run(comparison: Comparison) -> Run:
    """Return the run that measures the base, as all variants read their texts."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    return Run(Variant(BASE, None, comparison.train, []))


def searches_of(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs that choose the rate of a variant: one at each of its rates, with the first seed."""
    return [Run(variant, rate, comparison.seeds[0]) for rate in variant.rates]


@dataclasses.dataclass(frozen=True)
class Point:
    """Losses of the texts, in nats per token by name, after `step` steps of training."""

    step: int
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run, or of the base, whose curve is a single point; losses are of packed sequences, in the precision of training.

    Args:
        tasks: Metrics of the trained model by task and name.
        shuffled: Losses after the rows of the trained model's value tables were permuted; `saved`: those before.
        control: Name of a null control; `control_of`: its variant.
        starts_at_base: Whether the upscaled model was verified to compute the same as the base, bit for bit; None if nothing was.
        is_causal: Whether every token is computed without later tokens.
        is_certified: Whether the trained model came with a certificate of protected texts.
        tokens: Number of tokens that it trained on, in `seconds`.
        peak_memory_bytes: What PyTorch allocated on a GPU, else the resident memory of the process, up to the end of training.
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
    is_certified: bool = False
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def starts_elsewhere(self) -> bool:
        """True if the run upscaled, and the upscaled model was not verified to start at the base."""
        return self.request.get("upscale") is not None and not self.starts_at_base

    @property
    def start(self) -> Point:
        """Losses of the model that training began with."""
        return self.curve[0]

    @property
    def losses(self) -> Mapping[str, float]:
        """Losses of the trained model; empty if the comparison has no texts."""
        return self.curve[-1].losses if self.curve else {}


def read_result(folder: Path) -> Result | None:
    """Return the result of the run with a folder, `FOLDER.json`; None if there is no result yet."""
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
    with atomic_write(folder.with_name(f"{folder.name}.json")) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(result), indent=1), encoding="utf-8")


class Inputs:
    """Digests of the texts and the base of a comparison that `plan` has resolved, each of which is read once."""

    def __init__(self, comparison: Comparison):
        self._comparison = comparison
        self._hash_text, self._hash_base = functools.cache(hash_text), functools.cache(hash_base)

    def digests_for(self, variant: Variant) -> dict[str, str]:
        """Return the digests `data` and `base` of the runs of a variant, 64 hexadecimal digits each.

        `data` covers the variant's corpus, all measured texts and questions of tasks. Of datasets on the Hub, only the name counts.
        """
        tasks = self._comparison.tasks
        questions = [] if tasks is None or not tasks.data else [tasks.data]
        digests = map(self._hash_text, [*variant.corpora, *self._comparison.texts.values(), *questions])
        data = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        return {"data": data, "base": self._hash_base(self._comparison.base)}


def hash_text(path: str) -> str:
    """Return the SHA-256 of a file, or of a folder's files in sorted order; of a name that is not a path, that of the name."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return hashlib.sha256(path.encode()).hexdigest()
    return _hash_files(folder, [folder] if folder.is_file() else folder.rglob("*"))


def hash_base(base: str) -> str:
    """Return the SHA-256 of a base's weights, config and tokenizer, which are fetched if the base is on the Hub."""
    from upscalers.checkpoint.source import resolve_source

    if Path(base).expanduser().is_file():
        return hash_text(base)
    with resolve_source(base) as source:
        read = [
            each for each in source.folder.iterdir() if each.suffix == ".safetensors" or is_of(each.name, TOKENIZER)
        ]
        return _hash_files(source.folder, [*read, source.folder / "config.json"])


def _hash_files(root: Path, files: Iterable[Path]) -> str:
    """Return the SHA-256 of files and their names below a root, in sorted order. Anything else than files is left out."""
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        name = file.relative_to(root).as_posix() if file != root else ""
        digest.update(f"{name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def code_version() -> str:
    """Return the version of the package and, in a clone, the commit, which ends in `-dirty` if a file was changed."""
    root, described = Path(__file__).parents[2], ""
    if (root / ".git").exists():
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # git is not installed, or knows no commit
            described = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return f"{__version__} ({described})" if described else __version__
