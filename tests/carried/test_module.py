"""The module of code that a checkpoint carries: one file for its memories alone, which is the same whoever writes it."""

import ast
import hashlib
import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from carried.made import ALL_CASES, CASES, METHODS, MOST_LINES
from pairs import by_default, wanted_by_tests

import midus_hf
from midus_hf.carried import standins
from midus_hf.carried.module import reference_modules
from midus_hf.carried.sources import Source, defined
from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memories.registry import MEMORY_TYPES, layer_class
from midus_hf.version import __version__

ROOT = Path(__file__).parent.parent.parent
# What a carried module may import beside Python's own library: torch, transformers, and what this one installs.
OTHERS = {"torch", "transformers", "safetensors", "huggingface_hub"}

# Parts that some memories need, by the methods that need them, or by how their names begin.
NEEDED_BY = {
    "AttentionHost": ("hier-kv", "moda", "packs"),
    "PackBank": ("packs",),
    "AttentionAdapters": ("hier-lora-qk", "hier-lora-vo"),
    "AttentionHeads": ("hier-kv",),
    "DepthHeads": ("moda",),
    "InsideFeedForward": ("hier-lora-ffn",),
    "BesideFeedForward": ("engram", "hier-ffn", "ultramem-v2"),
    "BehindAttention": ("engram", "moc"),
    "Skip": ("ultramem-v2",),
    "MemoryBank": ("hier-",),
    "BankLayout": ("hier-",),
    "TrainedBank": (),
    "Tables": ("engram", "moc", "ultramem-v2"),
    "States": ("engram", "moc", "packs"),
    "Tokens": ("engram", "moc", "packs"),
    "RouterReports": ("moc",),
    "WholeSequences": ("moc",),
    "ScaledInitialisation": ("ultramem-v2",),
}

of_all_cases = pytest.mark.parametrize(("family", "method"), CASES)
on_llama = pytest.mark.parametrize("method", METHODS)


def source_of(folder: Path) -> str:
    return (folder / "modeling_midus.py").read_text(encoding="utf-8")


def imported(folder: Path) -> Any:
    """The module of a checkpoint, under a name of its own."""
    name = f"carried_{folder.name.replace('-', '_')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "modeling_midus.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def imports_of(source: str) -> set[str]:
    """The packages that a source imports."""
    results = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            results |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, ast.unparse(node)
            results.add(node.module.partition(".")[0])
    return results


@of_all_cases
def test_a_checkpoint_carries_one_module_of_few_lines(family, method, checkpoints):
    (path,) = checkpoints(family, method).rglob("*.py")
    assert path.name == "modeling_midus.py"
    assert len(path.read_text().splitlines()) <= MOST_LINES[method]


@of_all_cases
def test_the_header_tells_version_and_memories_and_the_digest_of_what_follows(family, method, checkpoints):
    folder = checkpoints(family, method)
    opening, header, body = source_of(folder).split('"""', 2)
    assert opening == ""
    assert f"midus-hf {__version__} wrote this module" in header
    for entry in json.loads((folder / "config.json").read_text())["memory"]:
        assert f"{entry['type']} memory" in header
    digest = header.strip().rpartition("SHA-256 of what follows: ")[2]
    assert digest == hashlib.sha256(body.removeprefix("\n\n").encode()).hexdigest()


@of_all_cases
def test_the_module_defines_each_name_that_it_reads_and_imports_none_that_it_does_not(family, method, checkpoints):
    path = checkpoints(family, method) / "modeling_midus.py"
    rules = ("--isolated", "--no-cache", "--select=F401,F811,F821,F822", "--output-format=concise")
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, path], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


@of_all_cases
def test_the_module_needs_torch_and_transformers_alone_and_has_what_its_memories_need_alone(
    family, method, checkpoints
):
    source = source_of(checkpoints(family, method))
    packages = imports_of(source)
    assert packages <= {*OTHERS, *sys.stdlib_module_names}
    assert not packages & {"ctypes", "subprocess", "threading", "multiprocessing", "concurrent", "mmap"}
    assert "triton" not in source.lower() and "native" not in source
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for name, methods in NEEDED_BY.items():
        assert (name in classes) is any(map(method.startswith, methods)), name
    (model,) = json.loads((checkpoints(family, method) / "config.json").read_text())["architectures"]
    own = model.removesuffix("ForCausalLM")
    assert model in classes and all(name.startswith(own) for name in classes if name.startswith("Midus")), own
    carried = imported(checkpoints(family, method)).MEMORY_TYPES
    layers = {name: layer_class(options()).__name__ for name, options in MEMORY_TYPES.items()}
    other_memories = {layer for name, layer in layers.items() if name not in carried}
    assert not classes & other_memories


@of_all_cases
def test_each_forward_of_a_model_names_its_arguments(family, method, checkpoints):
    tree = ast.parse(source_of(checkpoints(family, method)))
    forwards = [
        (owner.name, function)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for function in owner.body
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
    ]
    assert forwards
    # What a host layer takes of earlier layers has to be arguments by place: activation checkpointing keeps these alone.
    by_place = {owner: function.args.vararg.arg for owner, function in forwards if function.args.vararg}
    assert by_place == {"HostLayer": "args"}


@on_llama
def test_nothing_in_the_module_resists_pickling_by_value(method, checkpoints):
    module = imported(checkpoints("llama", method))
    cloudpickle.register_pickle_by_value(module)
    try:
        cloudpickle.dumps([value for name, value in vars(module).items() if not name.startswith("__")])
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_a_name_means_the_same_in_the_modules_of_all_memories(checkpoints):
    """So that memories of any two types can be in one model."""
    written: dict[str, tuple[str, str]] = {}
    for method in METHODS:
        source = source_of(checkpoints("llama", method))
        for statement in ast.parse(source).body:
            text = ast.unparse(statement)
            for name in defined(statement) if "Midus" not in text.splitlines()[0] else ():
                other, before = written.setdefault(name, (method, text))
                assert before == text, f"{name} of {other} and of {method}"


_WRITTEN_TWICE = [("llama", "hier-lora-qk"), ("llama", "moc"), ("gemma3", "midus-hml")]

_WRITE_AGAIN = """
import hashlib
import json
import sys
from transformers import AutoConfig
import midus_hf
from midus_hf.carried.module import carried_module

digests = {}
for folder in reversed(json.loads(sys.argv[1])):
    digests[folder] = hashlib.sha256(carried_module(AutoConfig.from_pretrained(folder)).encode()).hexdigest()
print(json.dumps(digests))
"""


@pytest.fixture(scope="module")
def written_again(request, checkpoints) -> dict[str, str]:
    """Digests of the modules that a process in which sets have another order writes, in another order."""
    folders = [str(checkpoints(*case)) for case in wanted_by_tests(request, "family", "method")]
    environment = os.environ | {"PYTHONHASHSEED": "14", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _WRITE_AGAIN, json.dumps(folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("family", "method"), by_default(_WRITTEN_TWICE, ALL_CASES))
def test_the_same_config_gives_the_same_module_in_any_process(family, method, checkpoints, written_again):
    folder = checkpoints(family, method)
    assert written_again[str(folder)] == hashlib.sha256(source_of(folder).encode()).hexdigest()


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("midus-hml", "inner_residual", True),
        ("moc", "routing", "token"),
        ("moda", "joining", "interpolated"),
    ],
)
def test_a_config_with_other_options_builds_the_memory_of_these_options(method, key, value, checkpoints):
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
        (
            {"site": "skip"},
            "memory of type 'chapters' has site = 'skip'; expected 'behind-attention' or 'behind-layer', for which",
        ),
        ({"type": "headwise"}, "memory type is 'headwise'; expected 'chapters', for which"),
    ],
)
def test_sites_and_types_that_a_checkpoint_was_not_written_for_are_refused(change, message, checkpoints):
    folder = checkpoints("llama", "moc")
    content = json.loads((folder / "config.json").read_text())
    content["memory"][0] |= change
    with pytest.raises(ValueError, match=message):
        imported(folder).MidusLlamaConfig(**content)


# The definitions that carried code has another of, ops aside.
STANDS_FOR = {
    "check_entry": "midus_hf.memories.entries",
    "check_memories": "midus_hf.memories.entries",
    "check_place": "midus_hf.memories.entries",
    "MEMORY_TYPES": "midus_hf.memories.registry",
    "register_memory": "midus_hf.memories.registry",
    "layer_of": "midus_hf.memories.registry",
    "layer_class": "midus_hf.memories.registry",
    "memory_type": "midus_hf.memories.registry",
    "check_layer": "midus_hf.memories.module",
    "decode_cache": "midus_hf.memories.decode_cache",
    "option": "midus_hf.config.options",
    "read_options": "midus_hf.config.options",
    "write_code": "midus_hf.carried.module",
    "MemoryBank": "midus_hf.banks.memory_bank",
}


def test_a_stand_in_takes_the_place_of_nothing_else():
    definers: dict[str, list[str]] = {}
    for package in (midus_hf,):
        for result in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if result.name.startswith("midus_hf.cli"):
                continue  # no checkpoint carries commands
            path = Path(importlib.util.find_spec(result.name).origin)
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
                    for name in defined(statement):
                        definers.setdefault(name, []).append(result.name)

    plain = reference_modules()
    names = {
        name: module
        for module in (*plain, standins.__name__)
        for name in Source(module, {"midus_hf"}).definitions
        if not name.startswith("_")
    }
    assert set(STANDS_FOR) <= set(names)
    for name, module in names.items():
        replaced = [each for each in definers[name] if each != module]
        if module in plain:
            assert len(replaced) <= 1 and all(each.startswith("midus_hf.ops.") for each in replaced), name
        else:
            assert replaced == ([STANDS_FOR[name]] if name in STANDS_FOR else []), name


def test_a_bank_that_is_saved_writes_into_no_file_of_an_earlier_copy(checkpoints, tmp_path):
    folder = checkpoints("llama", "hier-ffn")
    model = imported(folder).MidusLlamaForCausalLM.from_pretrained(folder)
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    model.save_pretrained(earlier)
    shutil.copytree(earlier, later, copy_function=os.link)
    written = sorted(path for path in (earlier / BANKS_FOLDER).rglob("*") if path.is_file())
    before = {}
    for path in written:
        path.write_bytes(path.read_bytes() + b" ")
        before[path] = path.read_bytes()
    model.save_pretrained(later)
    assert written and {path: path.read_bytes() for path in written} == before
    for path in written:
        assert (later / path.relative_to(earlier)).read_bytes() == (folder / path.relative_to(earlier)).read_bytes()
