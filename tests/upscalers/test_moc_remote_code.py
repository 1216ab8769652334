"""A folder with Mixture of Chapters computes, generates and trains the same where this project is not installed."""

import json

import pytest
import torch
from models.chapter_models import chapter_model
from models.fresh_process import run_python
from tiny import prompt
from transformers import AutoModelForCausalLM

_RUN = """
import json
from transformers import AutoModelForCausalLM

try:
    import midus_hf
    findings = {"absent": False}
except ModuleNotFoundError:
    findings = {"absent": True}
for name in json.load(open("names.json")):
    tokens, logits, generated, loss = torch.load(f"{name}.pt")
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    model.save_pretrained(f"{name}-again")
    with torch.no_grad():
        same = torch.allclose(model(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    findings[name] = {
        "comes from the folder": type(model).__module__.startswith("transformers_modules."),
        "logits": same,
        "generates": torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), generated),
        "trains": torch.allclose(model.train()(tokens, labels=model_labels(tokens)).loss, loss, rtol=1e-4, atol=1e-5),
    }
print(json.dumps(findings))
"""

_LABELS = """
def model_labels(tokens):
    labels = tokens.clone()
    labels[:, :2] = -100
    return labels
"""

_OPTIONS = {
    "llama": {"routing": "chunk"},
    "gemma3": {"routing": "prompt", "share": "none", "kv_heads": 2, "weighting": "paper"},
    "mistral": {"routing": "token", "bank_rank": 5, "weighting": "logit_bias", "site": "behind-layer"},
}
"""Families, and options whose code differs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models that were saved, loaded by a process without this project, and saved again."""
    folder = tmp_path_factory.mktemp("remote")
    for family in _OPTIONS:
        model, tokens = chapter_model(family, dtype=torch.float32, **_OPTIONS[family]), prompt(9)
        model.save_pretrained(folder / family)
        labels = tokens.clone()
        labels[:, :2] = -100
        with torch.no_grad():
            logits = model(tokens).logits
        generated = model.generate(tokens, max_new_tokens=5, do_sample=False)
        loss = model.train()(tokens, labels=labels).loss
        torch.save((tokens, logits, generated, loss), folder / f"{family}.pt")
    (folder / "names.json").write_text(json.dumps(list(_OPTIONS)))
    printed = run_python(_LABELS + _RUN, folder, package_present=False)
    (folder / "findings.json").write_text(printed.splitlines()[-1])
    return folder


def test_the_process_has_no_code_but_that_of_folders(folder):
    assert json.loads((folder / "findings.json").read_text())["absent"] is True


@pytest.mark.parametrize("family", _OPTIONS)
def test_a_folder_computes_the_same_without_the_package(family, folder):
    found = json.loads((folder / "findings.json").read_text())[family]
    assert found == dict.fromkeys(("comes from the folder", "logits", "generates", "trains"), True)


@pytest.mark.parametrize("family", _OPTIONS)
def test_what_was_saved_without_the_package_loads_with_it(family, folder):
    again, before = (AutoModelForCausalLM.from_pretrained(folder / name) for name in (f"{family}-again", family))
    assert type(again) is type(before)
    state, expected = again.state_dict(), before.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
