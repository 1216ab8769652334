"""Options of a comparison, as its YAML file holds them."""

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Rate keys of `midus train`, such as `learning_rate`, with their values.
Rate = Mapping[str, float]


def rate_name(rate: Rate) -> str:
    """Return the folder name of a rate, without `learning_rate` in its keys: `0.001`, or `0.001,value=0.01`; `recipe` if empty."""
    named = [(key.removesuffix("learning_rate").rstrip("_"), value) for key, value in rate.items()]
    return ",".join(f"{name}={value:g}" if name else f"{value:g}" for name, value in named) or "recipe"


def check_rates(rates: list[float | dict[str, float]] | None) -> None:
    """Check that rates are numbers above 0, no two of them with the same folder name.

    A number and a mapping may have one name here: what a number stands for is known once its variant is planned.
    """
    if rates is not None and not rates:
        raise ValueError("rates is an empty list; expected one or more, or leave it out.")
    names: set[tuple[bool, str]] = set()
    for rate in rates or ():
        values = as_keys(rate)
        if not values or min(values.values()) <= 0:
            raise ValueError(
                f"rates has {rate}; expected numbers above 0, or mappings from keys of rates to such numbers."
            )
        name = rate_name(values)
        if (isinstance(rate, Mapping), name) in names:
            raise ValueError(f"rates has {name} twice; expected rates that differ, since each names a folder.")
        names.add((isinstance(rate, Mapping), name))


def as_keys(rate: float | Mapping[str, float]) -> Rate:
    """Return a rate as keys of `midus train`; a plain number is the value of `learning_rate`."""
    return rate if isinstance(rate, Mapping) else {"learning_rate": rate}


def split_function(function: str) -> tuple[Path, str]:
    """Return the file and the name of a variant's function, which is written as `mine.py:teach`.

    The file is read, and none of its code runs.

    Raises:
        ValueError: If the value is written otherwise, the file cannot be read as Python, or the function is missing.
    """
    file, _, name = function.rpartition(":")
    if not (file.endswith(".py") and Path(file).expanduser().is_file() and name.isidentifier()):
        raise ValueError(
            f"function is {function!r}; expected a file of Python and the name of a function in it, such as mine.py:teach."
        )
    path = Path(file).expanduser()
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"function is {function!r}, whose file cannot be read: {error}. Expected a file of Python."
        ) from error
    defined = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in defined or not _takes_arguments(defined[name]):
        raise ValueError(
            f"function is {function!r}, but the file defines {', '.join(defined) or 'no function'}; expected "
            f"def {name}({', '.join(_FUNCTION_ARGUMENTS)})."
        )
    return path, name


# Arguments that a variant's function is called with, all by name.
_FUNCTION_ARGUMENTS = ("base", "corpus", "output", "seed", "keys")


def _takes_arguments(taken: ast.arguments) -> bool:
    """Return whether a function with these arguments takes every argument that a variant's function is called with."""
    names = {argument.arg for argument in (*taken.args, *taken.kwonlyargs)}
    return taken.kwarg is not None or names.issuperset(_FUNCTION_ARGUMENTS)


# Mappings of measured texts, by their keys.
TEXT_KINDS = ("domain", "retention", "validation")

# What names a stage's own validation text, behind the stage's name.
_VALIDATION = "_validation"

# Names of variants become names of folders, null controls are named VARIANT+CONTROL, and names of texts are parts of keys in logs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Keys of `midus train`, `midus sft` and `upscale` that the comparison sets itself: they are dropped from recipes, and
# refused in mappings.
OWN_TRAINING_KEYS = (
    "model_name_or_path",
    "output_dir",
    "seed",
    "eval_text",
    "resume_from_checkpoint",
)
OWN_FINE_TUNING_KEYS = ("model_name_or_path", "output_dir", "seed", "resume_from_checkpoint")
OWN_UPSCALING_KEYS = ("base", "output", "seed", "dry_run", "json", "overwrite", "push_to_hub", "private")


@dataclasses.dataclass(kw_only=True)
class TaskOptions:
    """Tasks that the base and each model, before and after training, are scored on.

    Args:
        names: Names of tasks of `midus eval`, at least one.
        data: Folder with the questions of the local tasks. Default: none, every task is lm-eval's own.
        limit: Questions per task. Default: all.
        num_fewshot: Worked examples before a question. Default: what the task says, else 0.

    Raises:
        ValueError: If no task is named.
    """

    names: list[str]
    data: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("tasks.names is an empty list; expected one or more tasks. Leave tasks out for none.")


@dataclasses.dataclass(kw_only=True)
class VariantOptions:
    """Options of one variant: a method, a way to train the base, or a function that makes a model.

    Args:
        upscale: Keys of `upscale --config`, or the path of a recipe. Default: none, the base itself is trained.
        function: A file and the name of a function in it, such as `mine.py:teach`, which makes the trained model
            (`midus_hf.compare.making`). Default: none, `midus train` makes it.
        train: Keys of `midus train`, or the path of a recipe, that replace the comparison's keys. Default: none.
        rates: Learning rates for this variant alone, in the form that `Comparison` takes. Default: the rates of the comparison.
        replay: Share of a stage's tokens, above 0 and below 1, that comes from the corpora of earlier stages, evenly. Default: none.
        one_per_stage: Whether each stage trains a separate model from the base; a document is measured by the model of the stage
            whose corpus is nearest to the document. Default: false.
        upscale_each: Whether the model is upscaled again before each stage, which trains what is new alone. In values of options,
            `{corpus}` is then the stage's corpus, and in keys of `train`, `{earlier}` the list of corpora of earlier stages, also
            within a list; in the first stage a key that is `{earlier}` is left out. Default: false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    upscale: dict[str, Any] | str | None = None
    function: str | None = None
    train: dict[str, Any] | str | None = None
    rates: list[float | dict[str, float]] | None = None
    replay: float | None = None
    one_per_stage: bool = False
    upscale_each: bool = False

    @property
    def in_stages(self) -> str | None:
        """Name of a key that says how the variant learns stages; None if it learns them as any variant does."""
        return next((name for name in ("replay", "one_per_stage", "upscale_each") if getattr(self, name)), None)

    def __post_init__(self) -> None:
        check_rates(self.rates)
        if self.replay is not None and not 0 < self.replay < 1:
            raise ValueError(f"replay is {self.replay}; expected a share above 0 and below 1.")
        if self.one_per_stage and (self.replay is not None or self.upscale_each):
            raise ValueError(
                "one_per_stage trains each stage from the base, and replay or upscale_each goes on from earlier stages; expected one "
                "of them. Leave the other out."
            )
        if self.upscale_each and self.upscale is None:
            raise ValueError(
                "upscale_each is true, and upscale is not given; expected the keys to upscale with before each stage."
            )
        if self.function is not None:
            if self.upscale is not None or self.replay is not None:
                raise ValueError(
                    f"function is {self.function!r}, and upscale or replay is given too; expected one of them, since the function "
                    "makes the model itself and reads the corpus. Leave the other out."
                )
            split_function(self.function)


@dataclasses.dataclass(kw_only=True)
class StageOptions:
    """One of several domains that are learned one after the other.

    Args:
        corpus: File, folder or Hub id of the text that the stage trains on.
        validation: Path of text like the corpus that is neither trained on nor in `text`; rates are chosen on it.
        text: Path of held-out text like the corpus, on which learning and forgetting of the stage are measured.
    """

    corpus: str
    validation: str
    text: str


@dataclasses.dataclass(kw_only=True)
class PaperOptions:
    """Numbers that a paper prints, which the report puts below ours.

    Args:
        title: Title of the paper's table.
        columns: The task or the text that each column of the table measures, by the column's name: an accuracy in per cent, or a
            perplexity. Null stands for the mean of the accuracies.
        trained: The paper's numbers after training, one per column in order, by variant; null where the paper has none.
        tuned: The paper's numbers after fine-tuning, in the same form. Default: none.

    Raises:
        ValueError: If a variant has not one number per column.
    """

    title: str
    columns: dict[str, str | None]
    trained: dict[str, list[float | None]]
    tuned: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in ("trained", "tuned"):
            for name, numbers in getattr(self, stage).items():
                if len(numbers) != len(self.columns):
                    raise ValueError(
                        f"paper.{stage}.{name} has {len(numbers)} numbers; expected {len(self.columns)}, one per column."
                    )


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """Options of a comparison: variants that are trained on the same text from the same base, and measured alike.

    Args:
        base: Folder or Hub id of the base.
        output_dir: Folder of the comparison. Runs whose results it holds are not repeated.
        variants: Options of the variants, by name.
        train: Keys of `midus train` that all variants share, or the path of a recipe. Among them are `corpus` and `max_steps`, the
            budget of tokens.
        fine_tune: Keys of `midus sft`, or the path of a recipe: trained models are fine-tuned and measured again. Default: none.
        domain: Paths of held-out texts that resemble the corpus, by name; learning is measured on them. Default: none, which is
            allowed if there are `tasks`, and `controls` are false.
        retention: Paths of texts outside the domain, by name; forgetting is measured on them. Default: none.
        validation: Paths of held-out texts that resemble the corpus and are not in `domain`, by name; the rate of each variant is
            chosen on them alone. Default: none, which is allowed if each variant has one rate.
        stages: Options of `StageOptions` by name, in place of `train.corpus`, `domain` and `validation`: every variant learns the
            stages in this order, each for `train.max_steps`. Default: none.
        embedding_model: Folder or Hub id of the model that embeds documents for `one_per_stage`. Default: none.
        tasks: Options of `TaskOptions`. Default: none.
        rates: Learning rates; each variant is trained at each of them with the first seed, and at the one that ended best on
            `validation` with the other seeds. A number is the rate of what is new; values of an added memory learn ten times as
            fast, as in `midus train TEXTS`, unless `train` has their rate. A mapping from rate keys of `midus train` to
            numbers sets those keys alone. Default: the rates in `train`.
        seeds: Seeds of new parameters and of the order of texts. Default: `[0, 1, 2]`.
        controls: Whether all null controls that a variant's memory has are trained beside it, at its chosen rate. Default: true.
        paper: Options of `PaperOptions`: the numbers of a paper's table that the variants reproduce. Default: none.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    base: str
    output_dir: str
    variants: dict[str, VariantOptions]
    train: dict[str, Any] | str
    fine_tune: dict[str, Any] | str | None = None
    domain: dict[str, str] = dataclasses.field(default_factory=dict)
    retention: dict[str, str] = dataclasses.field(default_factory=dict)
    validation: dict[str, str] = dataclasses.field(default_factory=dict)
    stages: dict[str, StageOptions] = dataclasses.field(default_factory=dict)
    embedding_model: str | None = None
    tasks: TaskOptions | None = None
    rates: list[float | dict[str, float]] | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    controls: bool = True
    paper: PaperOptions | None = None

    def __post_init__(self) -> None:
        for name in ("variants", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected one or more.")
        check_rates(self.rates)
        self._read_stages()
        self._check_what_measures()
        for kind in ("variants", "stages", *TEXT_KINDS):
            for name in getattr(self, kind):
                if not (isinstance(name, str) and _NAME.fullmatch(name)):
                    raise ValueError(
                        f"{kind} has {name!r}; expected letters, digits and the signs . _ -, the first a letter or a digit. "
                        "Rename it, or put a number in quotes."
                    )
        if "base" in self.variants:
            raise ValueError("variants has 'base', which is what the base itself is called; give it another name.")
        for name in self.texts:
            kinds = [kind for kind in TEXT_KINDS if name in getattr(self, kind)]
            if len(kinds) > 1:
                raise ValueError(
                    f"{' and '.join(kinds)} both have a text {name!r}; expected a name of its own for each text."
                )
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds is {self.seeds}; expected different numbers from 0.")

    def _read_stages(self) -> None:
        """Take the measured texts from the stages, and check that nothing else is given that stages do not have."""
        if self.stages:
            domain = {name: stage.text for name, stage in self.stages.items()}
            validation = {f"{name}{_VALIDATION}": stage.validation for name, stage in self.stages.items()}
            foreign = {
                "domain": self.domain not in ({}, domain),
                "validation": self.validation not in ({}, validation),
                "tasks": self.tasks is not None,
                "fine_tune": self.fine_tune is not None,
                "paper": self.paper is not None,
                "controls": self.controls,
            }
            for key in (key for key, is_given in foreign.items() if is_given):
                raise ValueError(
                    f"{key} is given, and stages are too, which have no {key} beside them. "
                    f"{'Set controls: false' if key == 'controls' else f'Leave {key} out'}."
                )
            if len(self.stages) < 2:
                raise ValueError(
                    "stages has one stage; expected two or more. For one corpus, set train.corpus and domain."
                )
            self.domain, self.validation = domain, validation
        for name, variant in self.variants.items():
            if variant.in_stages is not None and not self.stages:
                raise ValueError(
                    f"variants.{name} has {variant.in_stages}, and there are no stages; give some, or leave it out."
                )
            if variant.one_per_stage and self.embedding_model is None:
                raise ValueError(
                    f"variants.{name} has one_per_stage, which needs embedding_model; give a model that embeds documents."
                )
        if self.embedding_model is not None and not any(one.one_per_stage for one in self.variants.values()):
            raise ValueError(
                "embedding_model is given, and no variant has one_per_stage, which reads it; leave it out."
            )

    def _check_what_measures(self) -> None:
        """Check that something measures learning, and that other text chooses the best of several rates."""
        if not (self.domain or self.tasks):
            raise ValueError(
                "domain is empty, and there are no tasks; expected something by which learning is measured."
            )
        several = [name for name in self.variants if len(self.rates_of(name)) > 1]
        if several and not self.validation:
            raise ValueError(
                f"validation is empty, and {several[0]} has several rates; expected text like the corpus that is neither trained on "
                "nor in domain, by which a rate is chosen. Give some, as validation.NAME=PATH, or one rate for each variant."
            )
        if self.controls and not self.domain:
            raise ValueError(
                "domain is empty, and controls are true; expected held-out text by which learning is measured. Give some, or "
                "controls: false."
            )

    @property
    def texts(self) -> dict[str, str]:
        """Paths of all measured texts by name: `domain`, then `retention`, then `validation`."""
        return {**self.domain, **self.retention, **self.validation}

    def label(self, text: str) -> str:
        """Return the key of a measured text, such as `domain.plants`, or `stages.plants.text` of a stage."""
        if text in self.stages:
            return f"stages.{text}.text"
        if self.stages and text in self.validation:
            return f"stages.{text.removesuffix(_VALIDATION)}.validation"
        kind = next(kind for kind in TEXT_KINDS if text in getattr(self, kind))
        return f"{kind}.{text}"

    def rates_of(self, variant: str) -> list[Rate]:
        """Return the rates of a variant as keys of `midus train`; a single empty one where `train` has the rate."""
        rates = self.variants[variant].rates or self.rates
        return [{}] if rates is None else [as_keys(rate) for rate in rates]
