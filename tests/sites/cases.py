"""The table of sites: a toy memory at each of them, and the families that each is tested on."""

import itertools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pairs import by_default, taking_turns
from tiny import NATIVE_FAMILIES
from transformers import PreTrainedModel

from midus_hf.memories.tables import DeclaredModule


@dataclass(frozen=True)
class SiteCase:
    """One row of the table.

    Args:
        name: Of the row.
        method: That gives a base the memory.
        options: Of the method.
        site: Where the memory sits.
        layers: That have it in a model of four layers; of six where they are inserted.
        into: For the site `skip`, the layer behind which each adds.
    """

    name: str
    method: str
    options: dict[str, Any]
    site: str
    layers: list[int]
    into: list[int] = field(default_factory=list)

    @property
    def is_attached(self) -> bool:
        """Whether the memory is attached to layers of the base."""
        return self.site != "inserted"

    @property
    def shares_tables(self) -> bool:
        """Whether its layers share tables."""
        return self.options.get("share", 1) > 1

    def is_new(self, name: str) -> bool:
        """Whether a tensor of the model is one that the base does not have."""
        if not self.is_attached:
            return name.startswith(tuple(f"model.layers.{layer}." for layer in self.layers))
        return f".memories.{self.method}." in name or name.startswith(f"model.memory_tables.{self.method}.")


EVERY = [0, 1, 2, 3]

# A memory at every site: in every layer or in some, with tables of its own or shared ones.
CASES = {
    case.name: case
    for case in (
        SiteCase("beside-ffn", "toy", {"site": "beside-ffn"}, "beside-ffn", EVERY),
        SiteCase("shared tables", "toy", {"site": "beside-ffn", "share": 2}, "beside-ffn", EVERY),
        SiteCase("inside-ffn", "toy-ffn", {}, "inside-ffn", EVERY),
        SiteCase("inside-attention", "toy-attention", {}, "inside-attention", EVERY),
        SiteCase("inside heads", "toy-heads", {}, "inside-attention", EVERY),
        SiteCase("behind-attention", "toy", {"site": "behind-attention", "layers": 2}, "behind-attention", [1, 3]),
        SiteCase("behind-layer", "toy", {"site": "behind-layer", "layers": [1]}, "behind-layer", [1]),
        SiteCase("skip", "toy", {"site": "skip", "span": 2}, "skip", [0, 1], [2, 3]),
        SiteCase(
            "skip within layers", "toy", {"site": "skip", "span": 0, "share": 3, "rank": 3}, "skip", EVERY, EVERY
        ),
        SiteCase("inserted", "toy-inserted", {}, "inserted", [1, 4]),
    )
}

# Every site on a family without and on one with norms behind attention and feed-forward network, and on every other family the
# sites where most of a family's own code runs.
USUAL = [(case, family) for family in ("llama", "gemma3") for case in CASES]
USUAL += [
    (case, family)
    for family in NATIVE_FAMILIES
    if family not in ("llama", "gemma3")
    for case in ("inside heads", "inside-attention")
]


def everywhere() -> pytest.MarkDecorator:
    """Run a test on every row of the table, `case`, and on every `family`: on usual pairs, and with the product on all."""
    return _parametrized(by_default(USUAL, [(case, family) for family in NATIVE_FAMILIES for case in CASES]))


def each(names: Iterable[str] = CASES) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on rows of the table, `case`, with a `family` that is another one for each row and each test.

    So every row and every family meet every test. With the product each row runs with each family.
    """
    names = list(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        kept = taking_turns(names, NATIVE_FAMILIES, first=zlib.crc32(test.__name__.encode()))
        return _parametrized(by_default(kept, itertools.product(names, NATIVE_FAMILIES)))(test)

    return decorate


def _parametrized(pairs: Iterable[tuple[str, str]]) -> pytest.MarkDecorator:
    values = [pytest.param(CASES[name], family, id=f"{name}-{family}".replace(" ", "-")) for name, family in pairs]
    return pytest.mark.parametrize(("case", "family"), values)


def give_values(model: PreTrainedModel, seed: int = 3) -> PreTrainedModel:
    """Fill the values of every memory, also those that layers share, so that the memories act."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            for name in module.names_of("value"):
                value = module.get_parameter(name)
                with torch.no_grad():
                    value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return model
