"""Heads over upscaled checkpoints: only the head is new; a head computes what its base's does, with and without the package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from carried.made import ALL_CASES, CASES
from carried.test_without_the_package import inputs_of, with_noise
from models.fresh_process import run_python
from pairs import by_default, wanted_by_tests
from tiny import NATIVE_FAMILIES, prompt
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from midus_hf.models.families import FAMILIES, HEADS

SETTINGS: dict[str, Any] = {"num_labels": 3, "pad_token_id": 0, "dtype": "float32"}

# Load each head from a checkpoint of the language model, save it, load it again, and compute with labels.
_COMPUTE = """
import torch
import transformers

LABELS = {
    "ForSequenceClassification": {"labels": torch.tensor([2, 0])},
    "ForTokenClassification": {"labels": torch.zeros(2, 24, dtype=torch.long)},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 4])},
}

def computed(kind, folder, inputs):
    auto = getattr(transformers, f"AutoModel{kind}")
    head = auto.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        output = head(**inputs)
    output = output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), -1)
    head.train()(**inputs, **LABELS[kind], use_cache=False).loss.backward()
    reached = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    return {"logits": output, "reached": reached, "module": type(head).__module__}

def loaded_again(kind, causal, saved, inputs, settings):
    auto = getattr(transformers, f"AutoModel{kind}")
    torch.manual_seed(2)
    head, info = auto.from_pretrained(causal, trust_remote_code=True, output_loading_info=True, **settings)
    head.save_pretrained(saved)
    return {**computed(kind, saved, inputs), "missing": set(info["missing_keys"])}
"""

_RUN = """
import json
import os

for name, kind, settings in json.load(open("names.json")):
    inputs = torch.load(f"{name}.pt")
    found = loaded_again(kind, f"{name}_acting", f"{name}_{kind}_here", inputs, settings)
    found["saved by the package"] = computed(kind, f"{name}_{kind}_package", inputs)["logits"]
    torch.save(found, f"{name}_{kind}_found.pt")
"""

here: dict[str, Any] = {}
exec(_COMPUTE, here)


def kinds_of(family: str) -> tuple[str, ...]:
    """Return the kinds of heads that a family has."""
    return FAMILIES[NATIVE_FAMILIES[family].config_class.model_type].config_class.head_kinds


ALL_HEADS = [(family, method, kind) for family, method in ALL_CASES for kind in kinds_of(family)]
# By default one kind of head per family and method, the kinds in turn.
_USUAL = [
    (family, method, kinds_of(family)[number % len(kinds_of(family))])
    for number, (family, method) in enumerate(case for case in CASES if isinstance(case, tuple) and len(case) == 2)
]


def new_names(kind: str) -> set[str]:
    """Return names of the tensors of a head."""
    layer = "qa_outputs" if kind == "ForQuestionAnswering" else "score"
    return {f"{layer}.weight"} | ({f"{layer}.bias"} if kind != "ForSequenceClassification" else set())


@pytest.fixture(scope="module")
def with_the_package(request, checkpoints, tmp_path_factory) -> tuple[Path, dict[tuple[str, ...], Any]]:
    """Load heads with the package; return the folder in which they lie, and what each computes."""
    folder, results = tmp_path_factory.mktemp("heads"), {}
    for family, method, kind in wanted_by_tests(request, "family", "method", "kind"):
        name, inputs = f"{family}_{method}", inputs_of(method)
        if not (folder / f"{name}_acting").exists():
            with_noise(checkpoints(family, method), folder / f"{name}_acting")
            torch.save(inputs, folder / f"{name}.pt")
        saved = folder / f"{name}_{kind}_package"
        results[family, method, kind] = here["loaded_again"](kind, folder / f"{name}_acting", saved, inputs, SETTINGS)
    return folder, results


@pytest.fixture(scope="module")
def without_the_package(with_the_package) -> dict[tuple[str, ...], Any]:
    """Return what the same heads compute in a process that can import nothing of this project."""
    folder, result = with_the_package
    names = [(f"{family}_{method}", kind, SETTINGS) for family, method, kind in result]
    (folder / "names.json").write_text(json.dumps(names))
    run_python(_COMPUTE + _RUN, folder, package_present=False)
    return {case: torch.load(folder / "{}_{}_{}_found.pt".format(*case)) for case in result}


@pytest.mark.parametrize(("family", "method", "kind"), by_default(_USUAL, ALL_HEADS))
def test_heads_compute_the_same_with_and_without_the_package(
    family, method, kind, with_the_package, without_the_package
):
    by_package, there = with_the_package[1][family, method, kind], without_the_package[family, method, kind]
    assert by_package["missing"] == there["missing"] == new_names(kind)
    assert by_package["module"].startswith("midus_hf.") and there["module"].endswith(".modeling_midus")
    torch.testing.assert_close(there["logits"], by_package["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(there["saved by the package"], by_package["logits"], rtol=1e-5, atol=1e-5)
    assert by_package["reached"] == there["reached"] > new_names(kind)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_classifier_is_born_as_the_classifier_of_its_base(family, method, checkpoints):
    made = checkpoints(family, method)
    models = []
    for folder in (made.parent / "base", made):
        torch.manual_seed(4)
        models.append(AutoModelForSequenceClassification.from_pretrained(folder, **SETTINGS).eval())
    base, model = models
    assert type(model).__name__.startswith("Midus") and torch.equal(model.score.weight, base.score.weight)
    mask = torch.ones_like(prompt())
    mask[0, :5] = 0
    with torch.no_grad():
        assert torch.equal(model(prompt(), mask).logits, base(prompt(), mask).logits)
        assert torch.equal(model(**inputs_of(method)).logits, base(prompt()).logits)


def test_question_answering_is_born_from_the_base_whose_own_class_forgets_the_stack(checkpoints):
    """Load the stack that `LlamaForQuestionAnswering` starts at random, since the class calls the stack by another name."""
    made = checkpoints("llama", "midus-hml")
    base, info = AutoModelForQuestionAnswering.from_pretrained(made.parent / "base", output_loading_info=True)
    model = AutoModelForQuestionAnswering.from_pretrained(made).eval()
    assert any("layers" in name for name in info["missing_keys"])
    stack = HEADS["ForSequenceClassification"][0].from_pretrained(made.parent / "base").model
    base.transformer.load_state_dict(stack.state_dict())
    base.qa_outputs.load_state_dict(model.qa_outputs.state_dict())
    with torch.no_grad():
        expected, actual = base.eval()(prompt()), model(prompt())
    assert torch.equal(actual.start_logits, expected.start_logits)
    assert torch.equal(actual.end_logits, expected.end_logits)
