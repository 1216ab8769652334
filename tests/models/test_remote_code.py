"""A saved folder loads where this package is not installed, with the code that was saved in it."""

import ast
import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python
from models.upscaled import memory_config, upscaled_model
from pairs import by_default, wanted_by_tests
from tiny import FAMILIES, prompt, tiny_model
from transformers import AutoModelForCausalLM

import midus_config
import midus_hf
from midus_hf.models.export import ENTRY_MODULE, write_code
from midus_hf.ops.native.library import native_library

_LOAD = """
import json
import sys
from pathlib import Path
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

def code(folder):
    return {path.name: path.read_text() for path in Path(folder).glob("*.py")}

def computes_in_c(model):
    # The copy has the source of compiled ops, and finds their library or builds it.
    package = type(model).__module__.rpartition(".")[0]
    return sys.modules[f"{package}.midus_hf_ops_native_library"].native_library() is not None

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
        findings[family] = {
            "comes from the folder": all(
                type(part).__module__.startswith("transformers_modules.") for part in (config, model, stack, again)
            ),
            "is of the classes it was saved as": [type(part).__name__ for part in (config, stack, model)],
            "AutoModelForCausalLM": torch.equal(model(tokens).logits, logits),
            "AutoModel": torch.equal(stack(tokens).last_hidden_state, stream),
            "computes in C where the package does": computes_in_c(model) == json.load(open("computes_in_c.json")),
            "sharded": torch.equal(sharded(tokens).logits, logits),
            "saved again": torch.equal(again(tokens).logits, logits),
            "stack saved again": torch.equal(stack_again(tokens).last_hidden_state, stream),
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
    findings[family]["trains"] = torch.equal(loss, trained) and all(p.grad is not None for p in model.parameters())
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
    (folder / "computes_in_c.json").write_text(json.dumps(native_library() is not None))
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
    assert len(found) == 12
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


def imports_of(source: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_code_imports_flat_siblings_and_dependencies_alone(family, saved):
    paths = list((saved / family).glob("*.py"))
    for path in paths:
        compile(path.read_text(), path.name, "exec")
        for node in imports_of(path.read_text()):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and "." not in node.module, ast.unparse(node)
                assert (path.parent / f"{node.module}.py").is_file()
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not {name.partition(".")[0] for name in names} & {"midus_hf", "upscalers"}, ast.unparse(node)


def test_the_code_is_the_entry_and_exactly_what_it_imports(family, saved):
    reached, pending = set(), [ENTRY_MODULE]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            source = (saved / family / f"{name}.py").read_text()
            pending += [node.module for node in imports_of(source) if isinstance(node, ast.ImportFrom) and node.level]
    assert {path.stem for path in (saved / family).glob("*.py")} == reached
    own = type(upscaled_model(family)).__module__.replace(".", "_")
    others = {type(upscaled_model(name)).__module__.replace(".", "_") for name in FAMILIES} - {own}
    assert own in reached and not others & reached
    assert "midus_hf_memory_headwise" in reached


def test_code_differs_from_its_source_in_imports_alone(family, saved):
    roots = [Path(package.__file__).parent for package in (midus_config, midus_hf)]
    sources = {
        "_".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for root in roots
        for path in root.rglob("*.py")
    }
    for path in (saved / family).glob("*.py"):
        if path.stem == ENTRY_MODULE:
            continue
        written, original = (p.read_text().splitlines() for p in (path, sources[path.stem]))
        for new, old in zip(written, original, strict=True):
            prefixes = ("from .midus_hf_", "from .midus_config_"), ("from midus_hf.", "from midus_config.")
            assert new == old or (new.startswith(prefixes[0]) and old.startswith(prefixes[1]))


def test_a_model_without_memory_entries_saves_no_memory_layer(family, tmp_path):
    base = tiny_model(family)
    paths = write_code(tmp_path / "new" / "folder", memory_config(base, new_layers=()))
    assert {path.parent for path in paths} == {tmp_path / "new" / "folder"}
    assert "midus_hf_memory_headwise" not in {path.stem for path in paths}


def test_only_the_main_process_writes_code(family, tmp_path):
    upscaled_model(family).save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.glob("*.py"))


def test_modules_of_other_packages_may_import_one_another_in_either_form(tmp_path, monkeypatch):
    """The files are written under flat names, and so are their imports."""
    package = tmp_path / "packages" / "somebody"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "tables.py").write_text("SIZE = 3\n")
    (package / "more.py").write_text("from .tables import SIZE\n")
    (package / "memory.py").write_text(
        "from somebody.more import SIZE\nfrom .tables import SIZE as AGAIN\n\nclass Memory:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "packages")
    memory = importlib.import_module("somebody.memory").Memory
    monkeypatch.setattr("midus_hf.models.export.module_of", lambda memory_type: memory)
    written = write_code(tmp_path / "out", memory_config(tiny_model("llama")))
    text = {path.name: path.read_text() for path in written}
    assert (
        "from .midus_of_somebody_more import SIZE\nfrom .midus_of_somebody_tables import SIZE as AGAIN\n"
        in text["midus_of_somebody_memory.py"]
    )
    assert text["midus_of_somebody_more.py"] == "from .midus_of_somebody_tables import SIZE\n"
    assert text["midus_of_somebody_tables.py"] == "SIZE = 3\n"
