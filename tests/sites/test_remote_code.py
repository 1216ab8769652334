"""A folder with a memory of another package loads where neither that nor this project is installed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python
from pairs import by_default, wanted_by_tests
from sites.cases import CASES
from tiny import NATIVE_FAMILIES, prompt
from transformers import AutoModelForCausalLM

from midus_hf.training.optim.freezing import set_trainable

_LOAD = """
import json

class _NoTests:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sites", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, _NoTests())

from transformers import AutoModelForCausalLM

def is_absent(name):
    try:
        __import__(name)
    except ModuleNotFoundError:
        return True

findings = {"absent": [is_absent(name) for name in ("midus_hf", "upscalers", "sites.toy_memory")]}
for name in json.load(open("names.json")):
    tokens, scales, expected, scaled, trained = torch.load(f"{name}.pt")
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    model.save_pretrained(f"{name}-again", max_shard_size="8KB")
    again = AutoModelForCausalLM.from_pretrained(f"{name}-again", trust_remote_code=True)
    with torch.no_grad():
        findings[name] = {
            "comes from the folder": type(model).__module__.startswith("transformers_modules."),
            "logits": torch.equal(model(tokens).logits, expected),
            "scaled logits": torch.equal(model(tokens, toy_scale=scales).logits, scaled),
            "saved again": torch.equal(again(tokens).logits, expected),
        }
    loss = model.train()(tokens, labels=tokens, toy_scale=scales).loss
    findings[name]["trains"] = torch.equal(loss, trained)
print(json.dumps(findings))
"""


def named(cases: list[tuple[str, str]], by: str) -> dict[str, tuple[str, str, str]]:
    """Return rows of the table with families, by what names their folders."""
    return {f"{case.replace(' ', '-')}-{family}-{by}": (case, family, by) for case, family in cases}


# By default each class of a toy, tables that layers share, and what either way of saving left; tests/carried has every site.
_USUAL = named([("shared tables", "llama"), ("inside-ffn", "llama"), ("inside heads", "llama")], "saved")
_USUAL |= named([("inside-attention", "gemma3")], "saved") | named([("inserted", "gemma3")], "upscaled")
_NAMES = _USUAL | named([(case, "llama") for case in CASES], "saved")
_NAMES |= named([("inside-attention", family) for family in NATIVE_FAMILIES], "saved")
_NAMES |= named([("skip", "gemma3"), ("beside-ffn", "gemma3")], "upscaled")
each_name = pytest.mark.parametrize("name", by_default(_USUAL, _NAMES))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory, upscaled, toy_model) -> Path:
    """Models as `save_pretrained` and as `upscale` left them, which a process without their code loaded and saved again."""
    folder = tmp_path_factory.mktemp("remote")
    names = [name for (name,) in wanted_by_tests(request, "name")]
    for name in names:
        case, family, by = _NAMES[name]
        model = toy_model(CASES[case], family, acting=by == "saved")
        if by == "saved":
            model.save_pretrained(folder / name)
        else:
            shutil.copytree(upscaled(CASES[case], family), folder / name)
        scales = torch.tensor([0.5, -2.0])
        with torch.no_grad():
            expected, scaled = model(prompt()).logits, model(prompt(), toy_scale=scales).logits
            loss = model.train()(prompt(), labels=prompt(), toy_scale=scales).loss
        torch.save((prompt(), scales, expected, scaled, loss), folder / f"{name}.pt")
    (folder / "names.json").write_text(json.dumps(names))
    printed = run_python(_LOAD, folder, package_present=False)
    (folder / "findings.json").write_text(printed.splitlines()[-1])
    return folder


def test_the_process_of_these_tests_can_import_no_code_but_that_of_folders(folder):
    assert json.loads((folder / "findings.json").read_text())["absent"] == [True] * 3


@each_name
def test_a_folder_loads_and_is_saved_again_without_the_packages(name, folder):
    result = json.loads((folder / "findings.json").read_text())[name]
    assert len(result) == 5
    assert [kind for kind, holds in result.items() if holds is not True] == []


@each_name
def test_what_was_saved_without_the_packages_loads_with_them(name, folder, toy_model):
    case, family, by = _NAMES[name]
    expected = toy_model(CASES[case], family, acting=by == "saved")
    again = AutoModelForCausalLM.from_pretrained(folder / f"{name}-again")
    assert type(again) is type(expected)
    assert again.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, expected.state_dict()[key]) for key, tensor in again.state_dict().items())
    assert set_trainable(again).parameters == set_trainable(expected).parameters > 0


@each_name
def test_the_code_is_the_same_however_often_it_is_saved(name, folder):
    code = [
        {path.name: path.read_text() for path in at.glob("*.py")} for at in (folder / name, folder / f"{name}-again")
    ]
    assert code[0] == code[1]
    assert list(code[0]) == ["modeling_midus.py"]
