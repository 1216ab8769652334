"""Options of a comparison and their plan: variants, sizes, rates and null controls; without torch."""

import dataclasses
import filecmp
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import UpscaleRecord, language_entry, record_of
from midus_hf.config.errors import RequestError, name_in_request_errors, one_of
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.evaluation.evaluate import EvaluationSettings
from midus_hf.memories.controls import Change, controls_of
from midus_hf.memories.hierarchical.options import HierarchicalOptions
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import memory_type, sample_tensors
from midus_hf.sources.names import check_model_name, check_sources, saved_config
from midus_hf.training.keys import short_run_rates, trains_new_parts
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.methods.contract import get_method, with_corpus
from upscalers.methods.memory_methods import HostedMemoryMethod
from upscalers.plan import spell_placement
from upscalers.request import parse_options
from upscalers.runs.upscale import upscale

# Rate keys of `midus train`, such as `learning_rate`; null is one that the run measures.
Rate = Mapping[str, float | None]

BASE = "base"  # name of the run that measures the base
TEXT_KINDS = ("domain", "retention", "validation")  # keys of mappings of measured texts
SHUFFLED = "shuffled-addresses"  # a null control that is not trained, but measured on the variant's trained model
# Names of variants become folders, null controls are VARIANT+CONTROL, and names of texts are parts of keys in logs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Keys of `midus train` and of `upscale` that the comparison sets: dropped from recipes, refused in mappings.
_OWN_TRAINING_KEYS = ("model_name_or_path", "output_dir", "seed", "eval_text", "resume_from_checkpoint")
_OWN_UPSCALING_KEYS = ("base", "output", "seed", "dry_run", "json", "overwrite", "push_to_hub", "private")
_UPSCALING_KEYS = ("method", "num_new_layers", "placement", "options", "corpus", "dtype", "max_shard_size", "verify")


def rate_name(rate: Rate) -> str:
    """Return a rate's folder name, without `learning_rate`: `0.001`, `0.001,value=0.01`, `measured`, or `recipe`."""
    parts = []
    for key, value in rate.items():
        name = key.removesuffix("learning_rate").rstrip("_")
        number = "measured" if value is None else f"{value:g}"
        parts.append(f"{name}={number}" if name else number)
    return ",".join(parts) or "recipe"


@dataclasses.dataclass(kw_only=True)
class TaskOptions:
    """Tasks that the base and each trained model are scored on.

    Args:
        names: Names of tasks of `midus eval`, at least one.
        data: Folder with the questions of the local tasks. Default: none, all tasks are lm-eval's.
        limit: Questions per task. Default: all.
        num_fewshot: Worked examples before a question. Default: what the task says, else 0.
    """

    names: list[str]
    data: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None

    def __post_init__(self) -> None:
        with name_in_request_errors("tasks"):
            self.settings()

    def settings(self) -> EvaluationSettings:
        """Return the settings of `midus eval` for these tasks."""
        keys = dataclasses.asdict(self)
        return EvaluationSettings(tasks=keys.pop("names"), **keys)


@dataclasses.dataclass(kw_only=True)
class VariantOptions:
    """Options of one variant: a method, or a way to train the base as a baseline.

    Args:
        upscale: Keys of `upscale --config`, or the path of a recipe. Default: none, the base itself is trained.
        train: Keys of `midus train`, or the path of a recipe, that replace the comparison's keys. Default: none.
        rates: Learning rates for this variant, in the form that `Comparison` takes. Default: the rates of the comparison.
    """

    upscale: dict[str, Any] | str | None = None
    train: dict[str, Any] | str | None = None
    rates: list[float | dict[str, float | None] | None] | None = None


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """Options of a comparison: variants trained on the same text from the same base, and evaluated alike.

    Args:
        base: Folder or Hub id of the base.
        output_dir: Folder of the comparison. Runs whose results are in it are not repeated.
        variants: Options of the variants, by name.
        train: Keys of `midus train` that all variants share, or the path of a recipe; `max_steps` is the budget of tokens.
        domain: Paths of held-out texts like the corpus, by name; learning is measured on them. Default: none, if there are `tasks`.
        retention: Paths of texts outside the domain, by name; forgetting is measured on them. Default: none.
        validation: Paths of other texts like the corpus, by name; only these choose the rates. Default: none, for one rate.
        tasks: Options of `TaskOptions`. Default: none.
        rates: Learning rates, each for the first seed; the best one on `validation` gets the other seeds. A number is the rate of new
            parameters; values of an added memory learn ten times as fast unless `train` has their rate. A mapping from rate keys of
            `midus train` to numbers sets only those keys. Null: the run measures it. Default: the rates in `train`.
        seeds: Seeds of new parameters and of the order of texts. Default: `[0, 1, 2]`.
        controls: Whether the null controls of a variant's memory are trained as well, at its chosen rate. Default: true.
    """

    base: str
    output_dir: str
    variants: dict[str, VariantOptions]
    train: dict[str, Any] | str
    domain: dict[str, str] = dataclasses.field(default_factory=dict)
    retention: dict[str, str] = dataclasses.field(default_factory=dict)
    validation: dict[str, str] = dataclasses.field(default_factory=dict)
    tasks: TaskOptions | None = None
    rates: list[float | dict[str, float | None] | None] | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    controls: bool = True

    def __post_init__(self) -> None:
        """Refuse names, texts, rates and seeds that do not make a comparison."""
        wrong = next((name for name in (*self.variants, *self.texts) if not _NAME.fullmatch(str(name))), None)
        is_repeated = len(self.texts) < sum(len(getattr(self, kind)) for kind in TEXT_KINDS)
        are_seeds = len(set(self.seeds)) == len(self.seeds) and min(self.seeds, default=-1) >= 0
        several = next((name for name in self.variants if len(self.list_rates(name)) > 1), None)
        unchosen = (
            f"validation is empty, and {several} has several rates; expected validation.NAME=PATH, or one rate each."
        )
        for is_wrong, message in (
            (not self.variants, "variants is empty; expected one or more."),
            (BASE in self.variants, f"variants has {BASE!r}, the name of the base itself; choose another name."),
            (wrong is not None, f"{wrong!r} names a variant or text; expected letters, digits, and later . _ or -."),
            (is_repeated, f"texts are {', '.join(self.texts)}, one twice; expected a different name for each."),
            (not (self.domain or self.tasks), "domain is empty, without tasks; expected one of them."),
            (self.controls and not self.domain, "domain is empty; expected texts for controls, or controls: false."),
            (several and not self.validation, unchosen),
            (not are_seeds, f"seeds is {self.seeds}; expected one or more different numbers from 0."),
        ):
            if is_wrong:
                raise RequestError(message)

    @property
    def texts(self) -> dict[str, str]:
        return {**self.domain, **self.retention, **self.validation}

    def list_rates(self, variant: str, is_fast: bool = False) -> list[Rate]:
        """Return a variant's rates as keys of `midus train`; `is_fast`: its values learn ten times as fast at a number."""
        listed = self.variants[variant].rates or self.rates or [{}]
        rates: list[Rate] = []
        for rate in listed:
            if isinstance(rate, Mapping):
                rates.append(rate)
            elif rate is not None and is_fast:
                rates.append(short_run_rates(rate))
            else:
                rates.append({"learning_rate": rate})
        return rates


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant: keys of `upscale --config` (None: the base itself is trained), and keys of `midus train`.

    `controls` are its memory's null controls by name, with what each changes. A null control is named `VARIANT+CONTROL`
    (`control_of`, `control`). `trained_parameters` is None if only training knows.
    """

    name: str
    upscale: Mapping[str, Any] | None
    train: Mapping[str, Any]
    rates: Sequence[Rate]
    new_parameters: int = 0
    trained_parameters: int | None = None
    controls: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    control: str | None = None
    control_of: str | None = None

    @property
    def corpora(self) -> list[str]:
        corpus = self.train.get("corpus") or []
        return [corpus] if isinstance(corpus, str) else list(corpus)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: a variant at one rate, and a seed of new parameters and of the order of texts."""

    variant: Variant
    rate: Rate = dataclasses.field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        """`VARIANT/RATE/seed-N`, or `base` for the base, which is measured and not trained."""
        name = self.variant.name
        return name if name == BASE else f"{name}/{rate_name(self.rate)}/seed-{self.seed}"

    def folder(self, comparison: Comparison) -> Path:
        """The folder of the run's models; its result and its log are `FOLDER.json` and `FOLDER.log`."""
        return Path(comparison.output_dir) / "runs" / self.name

    def training_keys(self, comparison: Comparison, model: str, output: str) -> dict[str, Any]:
        """Return the keys of `midus train`, which measure texts at start and end, or every `eval_steps`."""
        own = {"model_name_or_path": model, "output_dir": output, "seed": self.seed}
        # Without the first key, a smaller batch at the end of a corpus would count as a step.
        keys = {"dataloader_drop_last": True, **self.variant.train, **self.rate, **own}
        if not comparison.texts:
            return keys
        steps = finite_number(keys.get("max_steps"))
        if steps is None or steps < 1:
            raise RequestError(
                f"variants.{self.variant.name} has max_steps {keys.get('max_steps')}; expected at least 1, the budget that variants "
                "are compared at. Set train.max_steps."
            )
        every = int(steps) if keys.get("eval_steps") is None else keys["eval_steps"]
        return {**keys, "eval_steps": every, "eval_text": comparison.texts, "eval_on_start": True}


def list_searches(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs that choose the rate of a variant: one at each of its rates, with the first seed."""
    return [Run(variant, rate, comparison.seeds[0]) for rate in variant.rates]


def plan(comparison: Comparison) -> tuple[Comparison, list[Variant]]:
    """Return a comparison with contents of files, and its variants with sizes; refuse wrong keys or files."""
    shared = _read_keys("train", comparison.train, _OWN_TRAINING_KEYS)
    variants = [_plan_variant(name, comparison, shared) for name in comparison.variants]
    given = comparison.variants
    options = {one.name: dataclasses.replace(given[one.name], rates=[*map(dict, one.rates)]) for one in variants}
    return dataclasses.replace(comparison, train=shared, variants=options), variants


def _plan_variant(name: str, comparison: Comparison, shared: Mapping[str, Any]) -> Variant:
    """Return a variant with what its model trains and the changes of its null controls."""
    options = comparison.variants[name]
    label = f"variants.{name}.upscale"
    train = {**shared, **_read_keys(f"variants.{name}.train", options.train, _OWN_TRAINING_KEYS)}
    keys = None
    controls = dict[str, Change]()
    new = 0
    trained = None
    if options.upscale is None:
        # A plain base does not record which parameters to train: all train, unless the recipe differs or trains adapters.
        train = train if train.get("adapters") else {"trainable": "all", **train}
        base = saved_config(comparison.base)
        kinds = [memory_type(entry.get("type")) for entry in language_entry(base).get("memory") or []]
        trainable = (record_of(base) or UpscaleRecord()).trainable
    else:
        keys = _read_keys(label, options.upscale, _OWN_UPSCALING_KEYS)
        if unknown := [key for key in keys if key not in _UPSCALING_KEYS]:
            raise RequestError(f"{label} has no option {unknown[0]!r}. {one_of(_UPSCALING_KEYS)}")
        if "method" not in keys or not isinstance(keys.get("options"), dict | None):
            raise RequestError(f"{label} is {keys}; expected a method of 'upscale methods', and a mapping of options.")
        if "corpus" in keys:
            with name_in_request_errors(label):
                keys["options"] = with_corpus(keys["method"], keys.get("options") or {}, keys.pop("corpus"))
        with name_in_request_errors(label):
            report = upscale(base=comparison.base, dry_run=True, **keys).parameters
        kinds, controls = _find_memory(comparison.base, keys)
        new = report.new
        trained = report.trainable
        trainable = get_method(keys["method"]).trainable
        # A null control that trains only certain roles would lack more than addressing if the variant trains the base as well.
        trains_more = train.get("trainable", "auto") not in ("auto", "new") or train.get("adapters")
        controls = {name: change for name, change in controls.items() if not (trains_more and change.trainable)}
    has_value_rate = any(train.get(key) is not None for key in ("value_learning_rate", "key_value_learning_rate"))
    is_fast = any(map(_has_values, kinds)) and trains_new_parts(train, trainable) and not has_value_rate
    rates = comparison.list_rates(name, is_fast)
    if len(names := [rate_name(rate) for rate in rates]) > len(set(names)):
        raise RequestError(f"variants.{name} has rates {', '.join(names)}; expected rates whose names differ.")
    return Variant(name, keys, train, rates, new, trained, controls if comparison.controls else {})


def _read_keys(where: str, keys: Mapping[str, Any] | str | None, reserved: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a mapping or recipe; those that the comparison sets raise, or are dropped."""
    if isinstance(keys, str):
        with name_in_request_errors(f"{where} names a file"):
            return {key: value for key, value in read_mapping(Path(keys)).items() if key not in reserved}
    if own := [key for key in keys or {} if key in reserved]:
        raise RequestError(f"{where} has {own[0]!r}, which the comparison sets for each run; leave it out.")
    return dict(keys or {})


def _has_values(kind: type[MemoryOptions]) -> bool:
    """Return whether a memory has values, or fetched blocks, which learn at the rate of values."""
    return issubclass(kind, HierarchicalOptions) or any(tensor.role == "value" for _, tensor in sample_tensors(kind))


def _find_memory(base: str, keys: Mapping[str, Any]) -> tuple[list[type[MemoryOptions]], dict[str, Change]]:
    """Return the options' class of the memory that upscaling adds, in a list, and its null controls by name."""
    method_class = get_method(keys["method"])
    placement = spell_placement(keys.get("placement"))
    if not issubclass(method_class, HostedMemoryMethod):
        return [], {}
    method = method_class(parse_options(method_class.options_class, keys.get("options") or {}, method_class.name))
    with resolve_source(base, config_only=True, needs=method.needs) as source:
        opened = open_base(source.folder, needs_weights=False)
        memory = method.entry(opened, method.plan(opened, keys.get("num_new_layers"), placement))
    changes: Any = controls_of(memory.options, opened.layout.sizes, memory.layers)
    return [type(memory.options)], {**changes}


def control_variants(variant: Variant, rate: Rate) -> list[Variant]:
    """Return the variants that are a variant's null controls; each differs by a single change."""
    made = []
    for name, change in variant.controls.items():
        keys = {**(variant.upscale or {})}
        train = variant.train
        if change.options:
            keys["options"] = {**(keys.get("options") or {}), **change.options}
        if change.trainable:
            train = {**train, "trainable": list(change.trainable)}
        if name != SHUFFLED:
            made.append(Variant(f"{variant.name}+{name}", keys, train, [rate], control=name, control_of=variant.name))
    return made


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check base, keys, files and columns, and that texts are measured alike and not trained on."""
    from midus_hf.data.corpus import read_corpus

    assert isinstance(comparison.train, Mapping), "files have been read"
    if (output := Path(comparison.output_dir)).exists() and not output.is_dir():
        raise RequestError(f"output_dir is {comparison.output_dir!r}, a file; expected a folder.")
    check_model_name("base", comparison.base)
    texts = [(f"{kind}.{name}", path) for kind in TEXT_KINDS for name, path in getattr(comparison, kind).items()]
    of_texts = {**comparison.train, "corpus_split": None, "corpus_name": None}
    sources: dict[tuple[str, str], Mapping[str, Any]] = dict.fromkeys(texts, of_texts)
    corpus, expected = comparison.train.get("corpus"), comparison.train.get("sequence_length")
    for variant in variants:
        length, streaming = variant.train.get("sequence_length"), variant.train.get("streaming")
        if length != expected or streaming:
            raise RequestError(
                f"variants.{variant.name} has sequence_length {length} and streaming {streaming}; expected {expected}, as train has, "
                "and no streaming, since all texts are measured alike."
            )
        key = "train.corpus" if variant.train.get("corpus") == corpus else f"variants.{variant.name}.train.corpus"
        sources |= {(key, each): variant.train for each in variant.corpora}
    check_sources(sources)
    from midus_hf.training.arguments import TrainArguments  # and with it torch, which the checks so far do not need

    for run in (run for variant in variants for run in list_searches(variant, comparison)):
        with name_in_request_errors(f"variants.{run.variant.name}, as a run of midus train"):
            from_mapping(TrainArguments, run.training_keys(comparison, "model", "trained"))
    for (key, name), (other, place) in itertools.product(texts, sources):
        one, two = (Path(each).expanduser().resolve() for each in (name, place))
        is_inside = one.is_relative_to(two) or two.is_relative_to(one)
        if key != other and (is_inside or (one.is_file() and two.is_file() and filecmp.cmp(one, two, shallow=False))):
            raise RequestError(f"{key} is {name!r}, which shares text with {other}, {place!r}; expected other text.")
    for (key, name), train in sources.items():
        if Path(name).expanduser().exists():
            named = {"split": train.get("corpus_split"), "name": train.get("corpus_name")}
            read_corpus(name, key=key, text_column=train.get("text_column") or "text", **named)
