"""What an upscaling method says of itself, and the table of methods."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from upscalers.engine.base_model import BaseModel
from upscalers.engine.errors import RequestError, near_matches
from upscalers.engine.families import Config
from upscalers.engine.layer_config import default_donor, follow_plan
from upscalers.engine.placements import place
from upscalers.engine.plan import Base, New, Plan, insertion_plan
from upscalers.engine.recipes import Copy, Recipe

METHODS: dict[str, type["Method"]] = {}


@dataclass(frozen=True)
class Paper:
    """Where a method comes from.

    Args:
        title: Of the paper.
        reference: arXiv id, or venue.
        bibtex: To cite it.
    """

    title: str
    reference: str
    bibtex: str


@dataclass
class NoOptions:
    """For a method that leaves nothing to choose."""


class Method(ABC):
    """A plan, and a recipe for each tensor that the plan asks for.

    A subclass says what is true of every run in class attributes, and overrides what differs from plain insertion.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line."""
    paper: ClassVar[Paper]
    options_class: ClassVar[type] = NoOptions
    identity: ClassVar[bool]
    """Whether the upscaled model computes exactly what the base computes."""
    trainable: ClassVar[Literal["new", "all"]] = "new"
    """What the paper trains afterwards."""
    default_placement: ClassVar[str] = "distributed"

    def __init__(self, options: Any):
        self.options = options

    def check(self, base: BaseModel) -> None:  # noqa: B027 - most methods take any base
        """Refuse a base that the method cannot upscale.

        Raises:
            RequestError: With the reason and what helps.
        """

    def plan(self, base: BaseModel, num_new_layers: int | None, placement: str | None) -> Plan:
        """The layer plan.

        Args:
            base: The base.
            num_new_layers: K. Default: half the layers of the base.
            placement: Policy or indices. Default: the method's own.
        """
        indices = place(self.default_placement if placement is None else placement, base.num_layers, num_new_layers)
        return insertion_plan(base.num_layers, indices)

    def donor(self, layer: New) -> int:
        """The base layer that a new layer takes its attention, and so its attention type, from."""
        return default_donor(layer)

    def config(self, base: BaseModel, plan: Plan) -> Config:
        """The raw config of the upscaled model."""
        donors = {index: self.donor(layer) for index, layer in enumerate(plan.layers) if isinstance(layer, New)}
        return follow_plan(base, plan, donors)

    def layer_recipes(self, base: BaseModel, layer: Base | New, index: int, seed: int) -> dict[str, Recipe]:
        """A recipe for each tensor of output layer `index`, by its name within the layer."""
        if isinstance(layer, New):
            return self.new_layer_recipes(base, layer, index, seed)
        return {
            name: Copy(base.tensors[source].shape, source) for name, source in base.layer_names(layer.index).items()
        }

    @abstractmethod
    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        """A recipe for each tensor of the new layer `index`, by its name within the layer."""


def register_method(name: str) -> Callable[[type[Method]], type[Method]]:
    """Register a method under the name that `--method` takes.

    Raises:
        ValueError: If the name is not lower case words joined by hyphens, or is taken.
    """
    if name in METHODS:
        raise ValueError(f"method {name!r} is already registered; choose another name.")
    if not name or name != name.lower() or not name.replace("-", "").isalnum():
        raise ValueError(f"method name is {name!r}; expected lower case words joined by hyphens.")

    def decorate(cls: type[Method]) -> type[Method]:
        cls.name = name
        METHODS[name] = cls
        return cls

    return decorate


def get_method(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        RequestError: If there is none; names near matches.
    """
    import upscalers.methods  # noqa: F401 - fills the table

    if name not in METHODS:
        raise RequestError(f"method {name!r} is unknown. {near_matches(name, sorted(METHODS))}")
    return METHODS[name]
