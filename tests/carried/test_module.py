"""The module of code that a checkpoint carries: one file for just its memories, the same whoever writes it."""

import ast
import hashlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from carried.example_checkpoints import ALL_CASES, CASES, METHODS, MOST_LINES, imported
from models.upscaled import memory_config
from pairs import by_default
from tiny import tiny_model

import midus_hf
from midus_hf.carried import standins
from midus_hf.carried.module import defined, stand_ins, write_code
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.registry import MEMORY_TYPES, layer_class
from midus_hf.version import __version__

ROOT = Path(__file__).parent.parent.parent
# What a carried module may import in addition to Python's own library: torch, transformers, and what this one installs.
OTHERS = {"torch", "transformers", "safetensors", "huggingface_hub", "regex"}

# What memories need besides the sites and services that their layers name, by the methods that do or the beginnings of their names.
NEEDED_BY = {
    "AttentionHost": ("hier-kv", "moda", "packs"),
    "Glossary": ("packs",),
    "MemoryBank": ("hier-",),
    "BankLayout": ("hier-",),
    "TrainedBank": (),
    **dict.fromkeys(("States", "Tokens"), ("engram", "moc", "packs")),
    "RouterReports": ("moc",),
}
LAYERS = {name: layer_class(options()) for name, options in MEMORY_TYPES.items()}

of_all_cases = pytest.mark.parametrize(("family", "method"), CASES)
on_llama = pytest.mark.parametrize("method", METHODS)


def source_of(folder: Path) -> str:
    return (folder / "modeling_midus.py").read_text(encoding="utf-8")


def imports_of(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    assert not any(node.level for node in nodes if isinstance(node, ast.ImportFrom))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_a_carried_glossary_only_reads(checkpoints):
    carried = imported(checkpoints("llama", "packs"))
    assert not {"add", "replace", "remove", "change"} & vars(carried.Glossary).keys()
    glossary = object.__new__(carried.Glossary)
    with pytest.raises(
        AttributeError, match="no 'add'; a checkpoint's own code only reads it: install midus-hf, or use midus edit"
    ):
        glossary.add("word5", "word6")


def test_security_page_says_how_long_modules_are():
    shortest, longest = min(MOST_LINES.values()), max(MOST_LINES.values())
    assert f"{shortest:,} to {longest:,} lines" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@of_all_cases
def test_checkpoint_carries_one_module_with_a_true_header(family, method, checkpoints):
    folder = checkpoints(family, method)
    assert [path.name for path in folder.rglob("*.py")] == ["modeling_midus.py"]
    source = source_of(folder)
    assert source.count("\n") <= MOST_LINES[method]
    opening, header, body = source.split('"""', 2)
    assert opening == ""
    assert f"midus-hf {__version__} wrote this module" in header
    for entry in json.loads((folder / "config.json").read_text())["memory"]:
        assert f"{entry['type']} memory" in header
    digest = header.strip().rpartition("SHA-256 of what follows: ")[2]
    assert digest == hashlib.sha256(body.removeprefix("\n\n").encode()).hexdigest()


def test_modules_define_what_they_read_and_import_no_more(checkpoints):
    paths = [checkpoints(*case) / "modeling_midus.py" for case in CASES]
    rules = ("--isolated", "--no-cache", "--select=F401,F811,F821,F822", "--output-format=concise")
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, *paths], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


@of_all_cases
def test_module_needs_only_torch_transformers_and_its_memory(family, method, checkpoints):
    source = source_of(checkpoints(family, method))
    packages = imports_of(source)
    assert packages <= {*OTHERS, *sys.stdlib_module_names}
    assert not packages & {"ctypes", "subprocess", "multiprocessing", "concurrent"}
    assert "triton" not in source.lower()
    assert "native" not in source
    assert not re.search("def (flops|values_read|memory_files|paged_layer|make_decode_cache)", source)
    assert "package_only" not in source
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for name, methods in NEEDED_BY.items():
        assert (name in classes) is any(map(method.startswith, methods)), name
    config = json.loads((checkpoints(family, method) / "config.json").read_text())
    layer = LAYERS[config["memory"][0]["type"]]
    others = set(LAYERS.values()) - set(layer.__mro__)
    assert not classes & {each.__name__ for each in others}
    for part in {part for each in LAYERS.values() for part in (*each.sites, *each.services)}:
        is_needed = any(issubclass(each, part) for each in (*layer.sites, *layer.services))
        assert part.__name__ in NEEDED_BY or (part.__name__ in classes) is is_needed, part
    (model,) = config["architectures"]
    own = model.removesuffix("ForCausalLM")
    of_families = {name for name in classes if re.match("Midus(?!Hml|Linear|Pkm)", name)}
    assert model in of_families, own
    assert all(name.startswith(own) for name in of_families), own


def test_model_without_memories_carries_no_memory_layer(family, tmp_path):
    (path,) = write_code(tmp_path, memory_config(tiny_model(family), new_layers=()))
    classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    assert path.name == "modeling_midus.py"
    assert not classes & {layer.__name__ for layer in LAYERS.values()}


@of_all_cases
def test_model_forwards_name_their_arguments(family, method, checkpoints):
    owners = [
        node for node in ast.walk(ast.parse(source_of(checkpoints(family, method)))) if isinstance(node, ast.ClassDef)
    ]
    forwards = {owner.name: each for owner in owners for each in owner.body if getattr(each, "name", "") == "forward"}
    # What a host layer takes of earlier layers has to be arguments by place: activation checkpointing keeps only these. A family may
    # pass a block, by place, what only parts read that the block dropped.
    by_place = {owner: forward.args.vararg.arg for owner, forward in forwards.items() if forward.args.vararg}
    assert by_place == {owner: "args" for owner in ("MemoryBlock", "HostLayer") if owner in forwards}
    assert ("MemoryBlock" in forwards) == method.startswith("midus")


@on_llama
def test_module_pickles_by_value(method, checkpoints):
    module = imported(checkpoints("llama", method))
    cloudpickle.register_pickle_by_value(module)
    try:
        cloudpickle.dumps([value for name, value in vars(module).items() if not name.startswith("__")])
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_names_mean_the_same_in_all_modules(checkpoints):
    """So that memories of any two types can be in one model."""
    written: dict[str, tuple[str, str]] = {}
    for method in METHODS:
        source = source_of(checkpoints("llama", method))
        for statement in ast.parse(source).body:
            text = ast.unparse(statement)
            for name in defined(statement) if "Midus" not in text.splitlines()[0] else ():
                if name in ("HostLayer", "MemoryBlock"):  # one stands for what the model does not have
                    continue
                other, before = written.setdefault(name, (method, text))
                assert before == text, f"{name} of {other} and of {method}"


_WRITE_AGAIN = """
import hashlib, json, sys
from transformers import AutoConfig
from midus_hf.carried.module import carried_module

folders = sys.argv[:0:-1]  # in another order
print(json.dumps({each: hashlib.sha256(carried_module(AutoConfig.from_pretrained(each)).encode()).hexdigest() for each in folders}))
"""


def test_same_config_gives_the_same_module_in_any_process(checkpoints):
    """In the other process sets have another order."""
    cases = by_default([("llama", "hier-lora-qk"), ("llama", "moc"), ("gemma3", "midus-hml")], ALL_CASES)
    folders = [str(checkpoints(*case)) for case in cases]
    environment = os.environ | {"PYTHONHASHSEED": "14", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _WRITE_AGAIN, *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = {folder: hashlib.sha256(source_of(Path(folder)).encode()).hexdigest() for folder in folders}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [("midus-hml", "inner_residual", True), ("moc", "routing", "token"), ("moda", "joining", "interpolated")],
)
def test_config_with_other_options_builds_their_memory(method, key, value, checkpoints):
    folder = checkpoints("llama", method)
    content = json.loads((folder / "config.json").read_text())
    content["memory"][0][key] = value
    model = imported(folder).MidusLlamaForCausalLM(imported(folder).MidusLlamaConfig(**content)).eval()
    assert getattr(model.config.memories().entries[0].options, key) == value
    with torch.no_grad():
        assert model(torch.arange(12)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": "skip"}, "site = 'skip'; expected 'behind-attention' or 'behind-layer', for which"),
        ({"type": "midus-hml"}, "memory type is 'midus-hml'; expected 'moc', for which"),
    ],
)
def test_unknown_sites_and_types_are_refused(change, message, checkpoints):
    folder = checkpoints("llama", "moc")
    content = json.loads((folder / "config.json").read_text())
    content["memory"][0] |= change
    with pytest.raises(ValueError, match=message):
        imported(folder).MidusLlamaConfig(**content)


# The definitions that carried code has another of, ops aside.
OF_REGISTRY = ("check_entry", "check_memories", "check_place", "MEMORY_TYPES", "register_memory", "register_layer")
STANDS_FOR = dict.fromkeys((*OF_REGISTRY, "layer_class", "memory_type"), "midus_hf.memories.registry")
STANDS_FOR |= {"write_code": "midus_hf.carried.module", "save_bank": "midus_hf.memories.hierarchical.bank"}
STANDS_FOR |= {"decode_cache": "midus_hf.memories.decode_cache", "check_layer": "midus_hf.memories.module"}
STANDS_FOR |= dict.fromkeys(("option", "read_options"), "midus_hf.config.options")
STANDS_FOR |= dict.fromkeys(("HostLayer", "MemoryBlock"), "midus_hf.memories.hosting.layer")


def test_stand_in_replaces_nothing_else():
    definers: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(midus_hf.__path__, "midus_hf."):
        path = Path(importlib.util.find_spec(module.name).origin)
        # No checkpoint carries commands.
        for statement in () if module.name.startswith("midus_hf.cli") else ast.parse(path.read_text()).body:
            for name in defined(statement):
                definers.setdefault(name, []).append(module.name)
    stood_for = {}
    for name, (module, replacement) in stand_ins().items():
        others = [each for each in definers[name] if each != standins.__name__]
        assert len(others) <= 1, name
        if replacement != name:
            assert others == [module], name
        elif others:
            stood_for[name] = others[0]
    assert stood_for == STANDS_FOR


def test_saved_bank_shares_no_file_with_an_earlier_copy(checkpoints, tmp_path):
    folder = checkpoints("llama", "hier-ffn")
    model = imported(folder).MidusLlamaForCausalLM.from_pretrained(folder)
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    model.save_pretrained(earlier)
    shutil.copytree(earlier, later, copy_function=os.link)
    written = [path for path in (earlier / BANKS_FOLDER).rglob("*") if path.is_file()]
    changed = {path: path.read_bytes() + b" " for path in written}
    for path, content in changed.items():
        path.write_bytes(content)
    model.save_pretrained(later)
    assert written
    assert {path: path.read_bytes() for path in written} == changed
    for path in written:
        assert (later / path.relative_to(earlier)).read_bytes() == (folder / path.relative_to(earlier)).read_bytes()
