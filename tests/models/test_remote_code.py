"""A saved folder loads where this package is not installed, with the code that was saved in it."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python
from models.upscaled import memory_config, upscaled_model
from pairs import by_default, wanted_by_tests
from tiny import FAMILIES, prompt, tiny_model
from transformers import AutoModelForCausalLM

from midus_hf.carried.module import carried_module, write_code
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.memory.registry import MEMORY_MODULES

_LOAD = """
import json
from pathlib import Path
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

def code(folder):
    return {path.name: path.read_text() for path in Path(folder).glob("*.py")}

def close(found, expected):
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)

def refusal(attempt):
    try:
        attempt()
    except (ImportError, OSError, ValueError) as error:
        return type(error).__name__

findings = {"imports": [refusal(lambda: __import__(name)) for name in ("midus_hf", "midus_hf.ops", "upscalers")]}
for family in json.load(open("families.json")):
    tokens, logits, stream, trained = torch.load(f"{family}.pt")
    config = AutoConfig.from_pretrained(family, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True)
    stack = AutoModel.from_pretrained(family, trust_remote_code=True)
    sharded = AutoModelForCausalLM.from_pretrained(f"{family}-sharded", trust_remote_code=True)
    model.save_pretrained(f"{family}-again")
    again = AutoModelForCausalLM.from_pretrained(f"{family}-again", trust_remote_code=True)
    stack.save_pretrained(f"{family}-stack")
    stack_again = AutoModel.from_pretrained(f"{family}-stack", trust_remote_code=True)
    again.save_pretrained(f"{family}-thrice")
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with torch.no_grad():
        own_logits, own_stream = model(tokens).logits, stack(tokens).last_hidden_state
        findings[family] = {
            "comes from the folder": all(
                type(part).__module__.startswith("transformers_modules.") for part in (config, model, stack, again)
            ),
            "is of the classes it was saved as": [type(part).__name__ for part in (config, stack, model)],
            "AutoModelForCausalLM": close(own_logits, logits),
            "AutoModel": close(own_stream, stream),
            "sharded": torch.equal(sharded(tokens).logits, own_logits),
            "saved again": torch.equal(again(tokens).logits, own_logits),
            "stack saved again": torch.equal(stack_again(tokens).last_hidden_state, own_stream),
            "a new model of its config has zero values": not fresh.model.layers[1].memory.value_bank.any(),
            "its code saved again": code(f"{family}-again") == code(family) == code(f"{family}-thrice"),
            "its config saved again": Path(f"{family}-again/config.json").read_text()
            == Path(f"{family}/config.json").read_text(),
            "refused without its code": [
                refusal(lambda: AutoModelForCausalLM.from_pretrained(f"{family}-bare", trust_remote_code=trust))
                for trust in (False, True)
            ]
            == ["ValueError", "OSError"],
        }
    model.train()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    findings[family]["trains"] = close(loss.detach(), trained) and all(p.grad is not None for p in model.parameters())
print(json.dumps(findings))
"""


# test_identity.py loads every family from the code in its folder.
some_families = pytest.mark.parametrize("family", by_default(["qwen3", "gemma2"], FAMILIES))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Every family saved whole."""
    folder = tmp_path_factory.mktemp("remote")
    for family in FAMILIES:
        upscaled_model(family).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def folder(request, saved) -> Path:
    """Families saved, whole and in shards, loaded, and saved again by a process without this package."""
    folder = saved
    families = [family for (family,) in wanted_by_tests(request, "family")]
    for family in families:
        model = upscaled_model(family)
        model.save_pretrained(folder / f"{family}-sharded", max_shard_size="20KB")
        shutil.copytree(folder / family, folder / f"{family}-bare", ignore=shutil.ignore_patterns("*.py"))
        assert len(list((folder / f"{family}-sharded").glob("*.safetensors"))) > 2
        with torch.no_grad():
            logits, stream = model(prompt()).logits, model.model(prompt()).last_hidden_state
        loss = model(prompt(), labels=prompt(), use_cache=False).loss.detach()
        torch.save((prompt(), logits, stream, loss), folder / f"{family}.pt")
    (folder / "families.json").write_text(json.dumps(families))
    printed = run_python(_LOAD, folder, package_present=False)
    (folder / "findings.json").write_text(printed.splitlines()[-1])
    return folder


def test_the_process_of_these_tests_cannot_import_the_package(folder):
    assert json.loads((folder / "findings.json").read_text())["imports"] == ["ModuleNotFoundError"] * 3


@some_families
def test_a_folder_loads_runs_trains_and_saves_again_without_the_package(family, folder):
    found = json.loads((folder / "findings.json").read_text())[family]
    model = upscaled_model(family)
    names = found.pop("is of the classes it was saved as")
    assert names == [type(part).__name__ for part in (model.config, model.model, model)]
    assert len(found) == 11
    assert [name for name, holds in found.items() if holds is not True] == []


@some_families
def test_what_was_saved_without_the_package_loads_with_it(family, folder):
    model = upscaled_model(family)
    again = AutoModelForCausalLM.from_pretrained(folder / f"{family}-again")
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


@some_families
def test_with_the_package_installed_its_own_classes_load_even_when_remote_code_is_trusted(family, folder):
    again = AutoModelForCausalLM.from_pretrained(folder / family, trust_remote_code=True)
    assert type(again) is type(upscaled_model(family))


def test_the_code_is_one_file_that_holds_this_family_alone(family, saved):
    (path,) = (saved / family).glob("*.py")
    assert path.name == f"{ENTRY_MODULE}.py"
    own, *others = (type(upscaled_model(name)).__name__ for name in sorted(FAMILIES, key=lambda name: name != family))
    source = path.read_text()
    assert f"class {own}(" in source and not any(f"class {other}(" in source for other in others)
    assert "class HeadwiseMemory(" in source


def test_a_model_without_memory_entries_saves_no_memory_layer(family, tmp_path):
    base = tiny_model(family)
    paths = write_code(tmp_path / "new" / "folder", memory_config(base, new_layers=()))
    assert paths == [tmp_path / "new" / "folder" / f"{ENTRY_MODULE}.py"]
    assert "HeadwiseMemory" not in paths[0].read_text()


def test_only_the_main_process_writes_code(family, tmp_path):
    upscaled_model(family).save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.glob("*.py"))


@pytest.fixture
def somebody(tmp_path, monkeypatch) -> Path:
    """The folder of another package, `somebody`, which can be imported."""
    package = tmp_path / "packages" / "somebody"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "somebody"]:
        del sys.modules[name]


def test_what_another_package_makes_of_our_classes_changes_no_code(monkeypatch):
    config = memory_config(tiny_model("llama"))
    expected = carried_module(config)
    monkeypatch.setattr("midus_hf.carried.module._written", {})

    class OfTheirs:
        def reads_heads(self): ...

    mixed = type("Mixed", (HeadwiseMemory, OfTheirs), {"__module__": "somebody.memory"})
    assert carried_module(config) == expected
    assert mixed in HeadwiseMemory.__subclasses__()


@pytest.mark.parametrize(
    "form", ["from somebody import tables", "from . import tables", "import somebody.tables as tables"]
)
def test_a_module_of_another_package_that_imports_modules_is_refused(form, somebody, tmp_path, monkeypatch):
    (somebody / "tables.py").write_text("SIZE = 3\n")
    (somebody / "memory.py").write_text(
        f"from midus_hf.memory import MemoryModule\n{form}\n\n\n"
        "class Memory(MemoryModule):\n    def forward(self, attention_output):\n        return tables.SIZE\n"
    )
    monkeypatch.setitem(MEMORY_MODULES, "headwise", importlib.import_module("somebody.memory").Memory)
    monkeypatch.setattr("midus_hf.carried.module._written", {})
    with pytest.raises(
        ValueError, match=r"somebody\.memory reads tables, which no module of somebody defines .* Import names from"
    ):
        write_code(tmp_path / "out", memory_config(tiny_model("llama")))


def test_modules_of_other_packages_may_import_one_another_in_either_form(somebody, tmp_path, monkeypatch):
    (somebody / "tables.py").write_text("SIZE = 3\nUNUSED = 4\n")
    (somebody / "more.py").write_text("from .tables import SIZE\n\n\ndef size():\n    return SIZE\n")
    (somebody / "memory.py").write_text(
        "from midus_hf.memory import MemoryModule\nfrom somebody.more import size\nfrom .tables import SIZE as AGAIN\n\n\n"
        "class Memory(MemoryModule):\n    def forward(self, attention_output):\n        return size() + AGAIN\n"
    )
    memory = importlib.import_module("somebody.memory").Memory
    monkeypatch.setitem(MEMORY_MODULES, "headwise", memory)
    monkeypatch.setattr("midus_hf.carried.module._written", {})
    (path,) = write_code(tmp_path / "out", memory_config(tiny_model("llama")))
    source = path.read_text()
    assert "SIZE = 3\n" in source and "UNUSED" not in source
    assert "return size() + SIZE\n" in source
    assert "somebody" not in "".join(line for line in source.splitlines() if "import" in line)
