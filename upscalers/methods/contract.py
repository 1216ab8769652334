"""The contract of an upscaling method, and the table of methods."""

import difflib
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from midus_hf.config.errors import RequestError, one_of
from midus_hf.config.plugins import load_plugins
from midus_hf.files.checkpoint_files import Kind
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.plan import New, Plan, follow_plan, insertion_plan, place
from upscalers.tensors.recipes import Copy, Measurement, Recipe, block_recipes

METHODS: dict[str, type["Method"]] = {}


@dataclass(frozen=True)
class Paper:
    """The paper that a method comes from.

    Args:
        key: Key of the BibTeX entry.
        title: Title of the paper.
        authors: Authors, as BibTeX takes them: `"Kim, Taero and Byun, Hoyoon"`.
        year: Year of the paper.
        reference: arXiv id, such as `"arXiv:2512.13751"`, or venue.
        booktitle: Proceedings that the paper is in. Default: None, an article on arXiv.
    """

    key: str
    title: str
    authors: str
    year: int
    reference: str
    booktitle: str | None = None

    @property
    def bibtex(self) -> str:
        kind = "article"
        where = f"journal = {{arXiv preprint {self.reference}}}"
        if self.booktitle is not None:
            kind = "inproceedings"
            where = f"booktitle = {{{self.booktitle}}}"
        fields = (f"title = {{{{{self.title}}}}}", f"author = {{{self.authors}}}", where, f"year = {{{self.year}}}")
        return f"@{kind}{{{self.key},\n  " + ",\n  ".join(fields) + "\n}"

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "reference": self.reference}


@dataclass
class NoOptions:
    """Options of a method without options."""


@dataclass(frozen=True)
class Surgery:
    """What a method makes of a base by a plan, and what is said of it before the work begins.

    Args:
        config: Config of the result.
        layers: For each output layer, a recipe for each of its tensors, by the name within the layer.
        outer: A recipe for each tensor outside the layers, by full name.
        remarks: Notes for the user about how the base was checked or read. Default: none.
        warnings: Warnings, which stand in the model card too. Default: none.
        zero_gains: Gains that start at zero, as `layers.3.NAME`, with the base's gains that they are added next to. Training
            scales their rate by the root mean square of the latter, which the config records. Default: none.
        bank_bytes: Bytes that `Method.fill_banks` writes. Default: 0.
    """

    config: Config
    layers: list[dict[str, Recipe]]
    outer: dict[str, Recipe]
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    zero_gains: Mapping[str, str] = field(default_factory=dict)
    bank_bytes: int = 0


class Method(ABC):
    """An upscaling method: a plan, and the surgery that follows it.

    A subclass sets class attributes, and overrides methods where it differs from plain insertion of layers.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    #: None for a common practice without a paper.
    paper: ClassVar[Paper | None]
    options_class: ClassVar[type] = NoOptions
    #: Whether the model computes exactly the same as the base: on the class by default options, on an instance by its own.
    identity: bool
    #: Exceptions to `identity`, a noun phrase, or None.
    identity_except: ClassVar[str | None] = None
    trainable: ClassVar[Literal["new", "all"]] = "new"
    #: Whether the result has parameters that the base lacks; without them there is nothing to train.
    adds_parameters: ClassVar[bool] = True
    #: Used if none is requested; None for a method that orders the layers itself, or adds none.
    default_placement: ClassVar[str | None] = "distributed"
    adds_layers: ClassVar[bool] = True
    #: Kinds of files that `check`, `plan` and `surgery` read in addition to config.json, such as `TRAVELLING` for the tokenizer: of a
    #: base on the Hub, these are fetched first, and weights only once the request is accepted.
    needs: ClassVar[tuple[Kind, ...]] = ()

    def __init__(self, options: Any):
        self.options = options

    @property
    def options_record(self) -> dict[str, Any]:
        """The options by name, as they are recorded, without local folders."""
        return asdict(self.options)

    def check(self, base: BaseCheckpoint) -> None:  # noqa: B027 - most methods take any base
        """Refuse, with a `RequestError`, a base that the method cannot upscale; what only weights tell is checked by `surgery`."""

    def check_machine(self) -> None:  # noqa: B027 - most methods need nothing special
        """Refuse, with a `RequestError`, a missing package, device or corpus, which a dry run does not need."""

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        """Return the layer plan.

        Args:
            base: The base checkpoint.
            num_new_layers: K, number of new layers. None: half the base's layers, or the nearest number that the placement allows.
            placement: Name of a placement policy, or indices joined by commas. None: the method's default.
        """
        policy = self.default_placement if placement is None else placement
        assert policy is not None, "a method without a placement plans for itself"
        indices = place(policy, base.layout.num_leading_layers, num_new_layers)
        layers = list(insertion_plan(base.num_layers, indices).layers)
        for index in indices:
            layer = layers[index]
            assert isinstance(layer, New)
            layers[index] = replace(layer, sources=self.sources(base, layer, index))
        return Plan(tuple(layers), base.num_layers)

    def sources(self, base: BaseCheckpoint, layer: New, index: int) -> tuple[int, ...]:
        """Return the base layers that new layer `index` is made from, the first for attention and its type."""
        source = layer.next if layer.next is not None else layer.previous
        assert source is not None
        return (source,)

    def placement_request(self, plan: Plan) -> dict[str, Any]:
        """Return the arguments of a request, such as `placement`, that make this plan again."""
        return {} if self.default_placement is None else {"placement": plan.new_indices}

    def review(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return warnings about measurements of solvers; raise `RequestError` to reject and remove the result."""
        return []

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        """Return config and tensors of the result: the base's, and those of new layers.

        Methods that change or say more return a copy of `super().surgery(...)` with other fields.
        """
        config = follow_plan(base, plan)
        layers: list[dict[str, Recipe]] = []
        for index, layer in enumerate(plan.layers):
            if isinstance(layer, New):
                layers.append(self.new_layer_recipes(base, layer, index, seed))
                continue
            names = base.layer_names[layer.index]
            layers.append({name: Copy(base.tensors[source].shape, source) for name, source in names.items()})
        names = base.outer_names(plan.num_layers)
        outer: dict[str, Recipe] = {new: Copy(base.tensors[name].shape, name) for name, new in names.items()}
        outer |= block_recipes(base, plan.sources, config)
        return Surgery(config, layers, outer)

    def fill_banks(self, base: BaseCheckpoint, folder: Path) -> None:  # noqa: B027 - most have none
        """Fill the banks of the result, after it was written and compared with the base."""

    def new_layer_recipes(self, base: BaseCheckpoint, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        """Return a recipe for each tensor of new layer `index`, by name; methods with new layers override it."""
        raise TypeError(f"{type(self).__name__} does not say what new layers are made from.")


def register_method(name: str) -> Callable[[type[Method]], type[Method]]:
    """Register a method under the name that `--method` takes; refuse a taken name, or no `identity`."""
    if name in METHODS:
        raise RequestError(f"method {name!r} is already registered; choose another name.")

    def decorate(cls: type[Method]) -> type[Method]:
        if not isinstance(getattr(cls, "identity", None), bool):
            raise RequestError(
                f"method {name} has identity = {getattr(cls, 'identity', None)!r}; expected True or False: whether, with the default "
                "options, the new model computes what the base computes."
            )
        cls.name = name
        METHODS[name] = cls
        return cls

    return decorate


def load_plugin_methods() -> None:
    """Register the methods and memories of other packages; warn of those that cannot be imported."""
    for group in ("midus_hf.memories", "upscalers.methods"):
        load_plugins(group, refuse=False)


def get_method(name: str) -> type[Method]:
    """Return the method of a name; a `RequestError` about an unknown one lists similar names."""
    import upscalers.methods  # noqa: F401 - fills the table

    if name not in METHODS:
        load_plugin_methods()
    if name not in METHODS:
        hint = one_of(sorted(METHODS))
        if "lora" in name.lower().split("-") and name.partition("-")[0] != "hier":
            hint = (
                "Adapters are trained on the base itself: 'midus train TEXTS --model BASE --output DIR --adapters {}'."
            )
        nearest = difflib.get_close_matches(name, METHODS, 1)
        hint = f"Did you mean {nearest[0]}? {hint}" if nearest else hint
        raise RequestError(f"method {name!r} is unknown. {hint}")
    return METHODS[name]


def with_corpus(method: str, options: Mapping[str, Any], corpus: str | None) -> dict[str, Any]:
    """Return a method's options with a corpus that was named outside them, if any.

    Raises:
        RequestError: If the method reads no corpus, or the options name one too.
    """
    if corpus is None:
        return dict(options)
    if not _reads_corpus(get_method(method)):
        reading = [name for name in sorted(METHODS) if _reads_corpus(METHODS[name])]
        raise RequestError(
            f"corpus is {corpus!r}, and method {method!r} reads no corpus; expected one of {', '.join(reading)}. Leave it out."
        )
    if "corpus" in options:
        raise RequestError(
            f"corpus is {corpus!r}, and {options['corpus']!r} among the method's options, where it is the same; expected one of "
            "them. Leave one out."
        )
    return {**options, "corpus": corpus}


def _reads_corpus(method: type[Method]) -> bool:
    return any(field.name == "corpus" for field in fields(method.options_class))
