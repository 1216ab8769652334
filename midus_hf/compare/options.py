"""Options of a comparison, as its YAML file holds them."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.sources.names import check_model_name, check_sources

# Rate keys of `midus train`, such as `learning_rate`, with their values.
Rate = Mapping[str, float]

TEXT_KINDS = ("domain", "retention", "validation")  # keys of mappings of measured texts
# Names of variants become names of folders, null controls are named VARIANT+CONTROL, and names of texts are parts of keys in logs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def rate_name(rate: Rate) -> str:
    """Return the folder name of a rate, without `learning_rate` in its keys: `0.001`, or `0.001,value=0.01`; `recipe` if empty."""
    named = [(key.removesuffix("learning_rate").rstrip("_"), value) for key, value in rate.items()]
    return ",".join(f"{name}={value:g}" if name else f"{value:g}" for name, value in named) or "recipe"


def as_keys(rate: float | Mapping[str, float]) -> Rate:
    """Return a rate as keys of `midus train`; a plain number is the value of `learning_rate`."""
    return rate if isinstance(rate, Mapping) else {"learning_rate": rate}


def _check_rates(rates: list[float | dict[str, float]] | None) -> None:
    """Check that rates are numbers above 0, and that no two numbers or two mappings have the same folder name."""
    if rates is not None and not rates:
        raise RequestError("rates is an empty list; expected one or more, or leave it out.")
    names: set[tuple[bool, str]] = set()
    for rate in rates or ():
        values = as_keys(rate)
        if not values or min(values.values()) <= 0:
            expected = "expected numbers above 0, or mappings from keys of rates to such numbers"
            raise RequestError(f"rates has {rate}; {expected}.")
        named = (isinstance(rate, Mapping), rate_name(values))
        if named in names:
            raise RequestError(f"rates has {named[1]} twice; expected rates that differ, since each names a folder.")
        names.add(named)


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
        if not self.names:
            raise RequestError("tasks.names is an empty list; expected one or more tasks. Leave tasks out for none.")
        for name, least in (("limit", 1), ("num_fewshot", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise RequestError(f"tasks.{name} is {value}; expected {least} or more. Leave it out for the default.")


@dataclasses.dataclass(kw_only=True)
class VariantOptions:
    """Options of one variant: a method, or a way to train the base as a baseline.

    Args:
        upscale: Keys of `upscale --config`, or the path of a recipe. Default: none, the base itself is trained.
        train: Keys of `midus train`, or the path of a recipe, that replace the comparison's keys. Default: none.
        rates: Learning rates for this variant alone, in the form that `Comparison` takes. Default: the rates of the comparison.
    """

    upscale: dict[str, Any] | str | None = None
    train: dict[str, Any] | str | None = None
    rates: list[float | dict[str, float]] | None = None

    def __post_init__(self) -> None:
        _check_rates(self.rates)


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """Options of a comparison: variants that are trained on the same text from the same base, and evaluated in the same way.

    Args:
        base: Folder or Hub id of the base.
        output_dir: Folder of the comparison. Runs whose results are in it are not repeated.
        variants: Options of the variants, by name.
        train: Keys of `midus train` that all variants share, or the path of a recipe; `max_steps` is the budget of tokens.
        domain: Paths of held-out texts like the corpus, by name; learning is measured on them. Default: none, if there are `tasks`.
        retention: Paths of texts outside the domain, by name; forgetting is measured on them. Default: none.
        validation: Paths of other texts like the corpus, by name; only these choose the rates. Default: none, for one rate.
        tasks: Options of `TaskOptions`. Default: none.
        rates: Learning rates, each for the first seed; the best one on `validation` gets the other seeds. A number is the
            rate of new parameters; values of an added memory learn ten times as fast unless `train` has their rate. A mapping from
            rate keys of `midus train` to numbers sets only those keys. Default: the rates in `train`.
        seeds: Seeds of new parameters and of the order of texts. Default: `[0, 1, 2]`.
        controls: Whether the null controls of a variant's memory are trained as well, at its chosen rate. Default: true.

    Raises:
        RequestError: If a value lies outside its range or contradicts another.
    """

    base: str
    output_dir: str
    variants: dict[str, VariantOptions]
    train: dict[str, Any] | str
    domain: dict[str, str] = dataclasses.field(default_factory=dict)
    retention: dict[str, str] = dataclasses.field(default_factory=dict)
    validation: dict[str, str] = dataclasses.field(default_factory=dict)
    tasks: TaskOptions | None = None
    rates: list[float | dict[str, float]] | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    controls: bool = True

    def __post_init__(self) -> None:
        for name in ("variants", "seeds"):
            if not getattr(self, name):
                raise RequestError(f"{name} is empty; expected one or more.")
        _check_rates(self.rates)
        several = [name for name in self.variants if len(self.rates_of(name)) > 1]
        if not (self.domain or self.tasks):
            raise RequestError("domain is empty, and there are no tasks; expected one of them, to measure learning.")
        if several and not self.validation:
            raise RequestError(
                f"validation is empty, and {several[0]} has several rates; expected text like the corpus that is neither trained on "
                "nor in domain, by which a rate is chosen. Give some, as validation.NAME=PATH, or one rate for each variant."
            )
        if self.controls and not self.domain:
            raise RequestError(
                "domain is empty, and controls are true; expected held-out text by which learning is measured. Give some, or "
                "controls: false."
            )
        for kind in ("variants", *TEXT_KINDS):
            for name in getattr(self, kind):
                if not (isinstance(name, str) and _NAME.fullmatch(name)):
                    raise RequestError(
                        f"{kind} has {name!r}; expected letters, digits and the signs . _ -, the first a letter or a digit. "
                        "Rename it, or put a number in quotes."
                    )
        if "base" in self.variants:
            raise RequestError("variants has 'base', which is the name of the base itself; choose another name.")
        for name in self.texts:
            kinds = [kind for kind in TEXT_KINDS if name in getattr(self, kind)]
            if len(kinds) > 1:
                both = " and ".join(kinds)
                raise RequestError(f"{both} both have a text {name!r}; expected a different name for each text.")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise RequestError(f"seeds is {self.seeds}; expected different numbers from 0.")

    @property
    def texts(self) -> dict[str, str]:
        """Paths of all measured texts by name: `domain`, then `retention`, then `validation`."""
        return {**self.domain, **self.retention, **self.validation}

    def label(self, text: str) -> str:
        """Return the key of a measured text, such as `domain.plants`."""
        return next(f"{kind}.{text}" for kind in TEXT_KINDS if text in getattr(self, kind))

    def rates_of(self, variant: str) -> list[Rate]:
        """Return the rates of a variant as keys of `midus train`; a single empty one if `train` has the rate."""
        rates = self.variants[variant].rates or self.rates
        return [{}] if rates is None else [as_keys(rate) for rate in rates]


def check_names(comparison: Comparison) -> None:
    """Refuse an invalid base, texts or output, as far as this can be checked before torch is imported."""
    if (output := Path(comparison.output_dir)).exists() and not output.is_dir():
        raise RequestError(f"output_dir is {comparison.output_dir!r}, a file; expected a folder.")
    for name, path in comparison.texts.items():
        if not Path(path).expanduser().exists():
            raise RequestError(
                f"{comparison.label(name)} is {path!r}, which does not exist; expected a file or a folder of text."
            )
    for name, train in [
        ("", comparison.train),
        *((f"variants.{k}.", v.train) for k, v in comparison.variants.items()),
    ]:
        corpus = train.get("corpus") if isinstance(train, Mapping) else None
        check_sources(
            (f"{name}train.corpus", each) for each in ([corpus] if isinstance(corpus, str) else corpus or [])
        )
    check_model_name("base", comparison.base)
