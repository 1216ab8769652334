"""The reference is what the docstrings say now, and leaves no public name out."""

import importlib

import pytest

from scripts.reference import MODULES, PAGE, document, public_names, render


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text(encoding="utf-8") == render(), "docstrings have changed; run make reference"


@pytest.mark.parametrize("module", MODULES)
def test_names_can_be_imported_as_they_are_listed(module):
    imported = importlib.import_module(module)
    for name in MODULES[module] or public_names(module):
        assert hasattr(imported, name)


def test_arguments_are_those_of_the_signature():
    kept = document("midus_hf.memory", "kept_values")
    assert kept.signature == "kept_values(model: nn.Module) -> Iterator[None]"
    assert kept.arguments == {"model": "A model, a part of a model, or a wrapper around a model."}
    assert list(document("midus_hf.training", "set_trainable").arguments) == ["model", "trainable", "frozen"]
    assert document("upscalers", "RequestError").signature == "class RequestError(ValueError)"
    assert [method.name for method in document("midus_hf.analysis.slots.usage", "Usage").methods] == [
        "count",
        "summary",
        "reset",
        "paused",
    ]


def test_what_has_no_docstring_or_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"neither defines nor imports absent"):
        document("midus_hf.memory", "absent")
    with pytest.raises(
        ValueError, match=r"module midus_hf\.analysis\.slots\.usage has no __all__; name what is documented"
    ):
        public_names("midus_hf.analysis.slots.usage")
    with pytest.raises(ValueError, match=r"has no docstring; expected one"):
        document("scripts.reference", "_parse")
