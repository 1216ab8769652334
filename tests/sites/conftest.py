"""The toy memories are registered while tests of this folder run, and at no other time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sites.cases import SiteCase, give_values
from sites.toys import ToyAttentionOptions, ToyFfnOptions, ToyHeadsOptions, ToyOptions
from transformers import PreTrainedModel

from midus_hf.memories.registry import MEMORY_TYPES
from tests.upscalers.checkpoints import load
from tests.upscalers.conftest import base, command, in_process, shared_base  # noqa: F401 - fixtures
from upscalers.methods.contract import METHODS, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod, InsertedMemoryMethod
from upscalers.runs.upscale import upscale

_OPTIONS = {
    "toy": ToyOptions,
    "toy-attention": ToyAttentionOptions,
    "toy-ffn": ToyFfnOptions,
    "toy-heads": ToyHeadsOptions,
}
_SAID = {"summary": "a toy memory", "paper": None, "identity": True}
for _name, _options in _OPTIONS.items():
    register_method(_name)(type(_name, (AttachedMemoryMethod,), {**_SAID, "memory_options": _options}))
register_method("toy-inserted")(type("toy-inserted", (InsertedMemoryMethod,), {**_SAID, "options_class": ToyOptions}))

_REGISTRIES = (MEMORY_TYPES, METHODS)


def _take_away_toys() -> list[dict]:
    """Take out of each registry what toys have entered, since tests elsewhere list what a registry has."""
    return [{name: each.pop(name) for name in list(each) if name.startswith("toy")} for each in _REGISTRIES]


# Whatever imports a toy after this finds it imported, and registers nothing.
_TOYS = _take_away_toys()


@pytest.fixture(scope="module", autouse=True)
def registered_toys() -> Iterator[None]:
    """The toy memories and their methods are there for the tests of a module."""
    for registry, entries in zip(_REGISTRIES, _TOYS, strict=True):
        registry.update(entries)
    yield
    _take_away_toys()


Upscaled = Callable[[SiteCase, str], Path]
ToyModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def upscaled(shared_base, tmp_path_factory) -> Upscaled:  # noqa: F811 - a fixture asks for another by its name
    """A tiny base with a toy memory, made once for each row of the table and family; nobody may change it."""
    made: dict[tuple[str, str], Path] = {}

    def folder(case: SiteCase, family: str) -> Path:
        key = case.name, family
        if key not in made:
            output = tmp_path_factory.mktemp("upscaled") / "model"
            upscale(base=shared_base(family), method=case.method, output=output, options=case.options, verify=False)
            made[key] = output
        return made[key]

    return folder


@pytest.fixture(scope="session")
def toy_model(upscaled) -> ToyModel:
    """A model with a toy memory, in eval mode, whose values are filled unless `acting` is false."""

    def model(case: SiteCase, family: str, dtype: torch.dtype | str = "auto", *, acting: bool = True):
        loaded = load(upscaled(case, family), dtype)
        return give_values(loaded) if acting else loaded

    return model
