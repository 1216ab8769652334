"""One run of a comparison, a variant at one rate with one seed: its name, keys and result, and the checks before it starts."""

import dataclasses
import filecmp
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison, Rate, check_names, rate_name
from midus_hf.compare.variants import BASE, Variant
from midus_hf.config.errors import RequestError, as_request_error, name_in_request_errors
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.json_text import read_json
from midus_hf.files.outputs import atomic_write
from midus_hf.files.secrets import for_record
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.keys import Rates

# Keys of `midus train` whose product is a run's number of sequences, with their defaults.
_SIZES = {"max_steps": -1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}

# Keys of `midus train` that hold a learning rate: the numeric fields of `Rates`.
_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]


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

    def log(self, comparison: Comparison) -> Path:
        """Return the file with the output of the run's process."""
        return self.folder(comparison).with_name(f"{self.folder(comparison).name}.log")

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
            "windows": _window_keys(self.variant.train),
            "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
        }
        return for_record(json.loads(json.dumps(values)))


@dataclasses.dataclass(frozen=True)
class Point:
    """Losses of the texts, in nats per token by name, after `step` steps of training."""

    step: int
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run, or of the base, whose curve is a single point.

    All losses are of packed sequences, in the precision of training. `tasks` are metrics of the trained model by task and name.
    `shuffled` are losses after the rows of the trained model's value tables were permuted, and `saved` the losses of the saved
    model before that. `controls` are the null controls that the memory has, with what each changes; a run
    that is itself a null control has `control` and `control_of`, its name and its variant. `starts_at_base` says whether the upscaled
    model was verified to compute the same as the base, bit for bit; None if nothing was upscaled or verified. `is_causal` says
    whether every token is computed without later tokens, `is_certified` whether the trained model came with a certificate of
    protected texts. `tokens` and `seconds` count only training. `peak_memory_bytes` is the memory that PyTorch allocated on a GPU,
    else the resident memory of the process, up to the end of training. `request` has all keys that the result depends on, and
    `origin` has digests of `data` and `base`, the `code` and the `machine`.
    """

    variant: str
    rate: Mapping[str, float]
    seed: int
    curve: list[Point]
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    shuffled: Mapping[str, float] | None = None
    saved: Mapping[str, float] | None = None
    controls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
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
    """Return the result of the run with a folder; None if there is no result yet."""
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


def base_run(comparison: Comparison) -> Run:
    """Return the run that measures the base, as all variants read their texts."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    return Run(Variant(BASE, None, comparison.train, []))


def searches_of(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs that choose the rate of a variant: one at each of its rates, with the first seed."""
    return [Run(variant, rate, comparison.seeds[0]) for rate in variant.rates]


def runs_at(rate: Rate, variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs of a variant at one rate, one per seed of the comparison."""
    return [Run(variant, rate, seed) for seed in comparison.seeds]


def tokens_of(variant: Variant) -> int | None:
    """Return how many tokens a run of a variant trains on; None if its keys give no number of steps."""
    sizes = [finite_number(variant.train.get(name, default)) for name, default in _SIZES.items()]
    known = [size for size in sizes if size is not None and size >= 0]
    return None if len(known) < len(sizes) else int(math.prod(known)) * _window_keys(variant.train)["sequence_length"]


def corpora_of(variant: Variant) -> list[str]:
    """Return the corpora that a variant trains on: paths, or ids on the Hub."""
    corpus = variant.train.get("corpus") or []
    return [corpus] if isinstance(corpus, str) else list(corpus)


def _window_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run with these keys of `midus train` reads texts: tokens per window, and the columns of text and path."""
    length = finite_number(train.get("sequence_length", TrainArguments.sequence_length))
    return {
        "sequence_length": TrainArguments.sequence_length if length is None else int(length),
        "column": train.get("text_column") or "text",
        "path_column": train.get("path_column"),
    }


def changed_keys(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of keys that differ between two requests; a missing key, null and an empty mapping are equal."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now or (before in (None, {}) and now in (None, {})) else [prefix or "all"]
    return [
        name
        for key in {**before, **now}
        for name in changed_keys(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
    ]


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check early what a run would refuse late: keys of runs, corpora, texts, tasks, and the base's tokenizer and positions.

    Raises a RequestError, or a ModuleNotFoundError if lm-eval, an extra that tasks need, is not installed. Texts are
    cached as tokens.
    """
    check_names(comparison)
    _check_texts(comparison, variants)
    for variant in variants:
        _check_keys(variant, comparison)
    _check_corpora(comparison, variants)
    if comparison.tasks is not None:
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.sources.progress import quiet_libraries

        with quiet_libraries():
            Tasks(comparison.tasks.names, comparison.tasks.data)
    _check_base(comparison)


def _check_texts(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that all measured texts differ, and that none of them is trained on."""
    texts: dict[str, Path] = {}
    for name, path in comparison.texts.items():
        label, text = comparison.label(name), Path(path).expanduser()
        for other, before in texts.items():
            if _overlap(text, before):
                raise RequestError(
                    f"{label} is {path!r}, which shares text with {other}, {str(before)!r}; expected texts that differ."
                )
        texts[label] = text
    corpora = [(one.name, corpus, Path(corpus).expanduser()) for one in variants for corpus in corpora_of(one)]
    for name, corpus, place in corpora:
        for label, text in texts.items():
            if place.exists() and _overlap(text, place):
                raise RequestError(
                    f"{label} is {str(text)!r}, which {name} trains on, since its corpus is {corpus!r}; expected text that no "
                    "variant trains on."
                )


def _overlap(first: Path, second: Path) -> bool:
    """Return whether one of two paths is inside the other, or both are files with the same content."""
    one, other = first.resolve(), second.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        return True
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _check_corpora(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that `midus train` can read the local corpora of all variants; a dataset of the Hub would have to be downloaded."""
    from midus_hf.data.corpus import may_be_dataset_id, read_corpus

    assert isinstance(comparison.train, Mapping), "files have been read"
    read: set[str] = set()
    for variant in variants:
        train, corpora, corpus = variant.train, corpora_of(variant), variant.train.get("corpus") or ""
        named = {"split": train.get("corpus_split"), "name": train.get("corpus_name")}
        source = json.dumps([corpora, named, column := train.get("text_column") or "text"])
        may_be_ids = all(may_be_dataset_id(name) and not Path(name).expanduser().exists() for name in corpora)
        if source not in read and not (corpora and may_be_ids):
            is_shared = corpus == comparison.train.get("corpus")
            key = "train.corpus" if is_shared else f"variants.{variant.name}.train.corpus"
            read_corpus(corpus, key=key, text_column=column, **named)
            read.add(source)


def _check_keys(variant: Variant, comparison: Comparison) -> None:
    """Check that `midus train` accepts the keys of every run of a variant."""
    for key in {key for rate in variant.rates for key in rate}:
        if key not in _RATES:
            raise RequestError(f"variants.{variant.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
    for run in searches_of(variant, comparison):
        keys = run.training_keys(comparison, "model", Path("trained"))
        if keys.get("streaming"):
            raise RequestError(
                f"variants.{variant.name} has streaming, and texts of a comparison are read whole, to be compared; expected a corpus "
                "that fits the disk. Leave streaming out."
            )
        with name_in_request_errors(f"variants.{variant.name}, as a run of midus train"):
            from_mapping(TrainArguments, keys)
    assert isinstance(comparison.train, Mapping), "files have been read"
    length, shared = (_window_keys(train)["sequence_length"] for train in (variant.train, comparison.train))
    if length != shared:
        raise RequestError(
            f"variants.{variant.name}.train.sequence_length is {length}, and that of train is {shared}; expected the same, since "
            "all texts are measured alike. Set train.sequence_length."
        )


def _check_base(comparison: Comparison) -> None:
    """Check that the base has a tokenizer and positions for a sequence, and that each text has a sequence of its tokens."""
    from transformers import AutoConfig

    from midus_hf.data.corpus import read_corpus
    from midus_hf.data.packing import packed_sequences
    from midus_hf.sources.progress import limit_bars
    from midus_hf.sources.tokenizers import load_tokenizer
    from midus_hf.training.inputs import check_sequence_length

    assert isinstance(comparison.train, Mapping), "files have been read"
    apart, keys = bool(comparison.train.get("document_mask")), _window_keys(comparison.train)
    length, column = keys["sequence_length"], keys["column"]
    with as_request_error(
        f"base is {comparison.base!r}, whose config or tokenizer cannot be loaded", OSError, ValueError
    ):
        config = AutoConfig.from_pretrained(comparison.base, trust_remote_code=False)
        tokenizer = load_tokenizer(comparison.base)
    check_sequence_length("train.sequence_length", length, config)
    options: dict[str, Any] = {"documents_apart": apart, "vocab_size": config.get_text_config().vocab_size}
    for name, path in comparison.texts.items():
        named = {"key": comparison.label(name), "text_column": column}
        with limit_bars():
            packed_sequences(read_corpus(path, **named), tokenizer, length, **named, **options)
