"""Checkpoints load and compute with the code that they carry, in a process that can import nothing of this project."""

import json
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from carried import computing
from carried.example_checkpoints import CASES, INFERRED, KINDS, METHODS, imported
from models.fresh_process import run_python
from pairs import by_default, wanted_by_tests
from safetensors.torch import load_file, save_file
from tiny import prompt

# Those whose whole model is traced: a memory in a layer of its own, and two attached ones, one with slots. By default
# only the last; docs/export.md exports the first with the package.
TRACED = by_default([("llama", "moc")], [("llama", method) for method in ("midus-hml", "moda", "moc")])

# By default each part of a model that no method brings as it is by default.
ON_LLAMA = [("llama", kind) for kind in by_default(["moc-own", "moc-per-sequence", "ultramem-v2-skip"], KINDS)]
# Methods whose classes are sent by value: a memory that is inserted, one with states, and one with a bank.
SENT = by_default(["midus-hml", "moc", "hier-ffn"], METHODS)

# Methods whose module registers an attention function with transformers, so that it has to be imported where its
# models run.
READ_BY_ATTENTION = ("hier-kv", "hier-lora-qk", "hier-lora-vo", "moda")
BY_VALUE = [case for case in CASES if case[1] in SENT and case[1] not in READ_BY_ATTENTION]

_RUN = """
import os
import sys
import cloudpickle

def is_absent(name):
    try:
        __import__(name)
    except ModuleNotFoundError:
        return True

def sent_to_another_process(name, inputs):
    classes = cloudpickle.loads(open(f"{name}.pickle", "rb").read())
    return logits_of(classes["model"].from_pretrained(name, config=classes["config"].from_pretrained(name)).eval(), inputs)

found = {"absent": [is_absent(name) for name in ("midus_hf", "upscalers")]}
for name in names:
    inputs = torch.load(f"{name}.pt")
    born, acting = (loaded(f"{name}_{kind}") for kind in ("born", "acting"))
    package = type(born).__module__.rpartition(".")[0]
    modules = [module for module in sys.modules if module.startswith(package + ".")]
    born.save_pretrained(f"{name}_again", max_shard_size="8KB")
    found[name] = {"modules": modules, "born": logits_of(born, inputs), "acting": computed(acting, inputs)}
    found[name]["experts"] = born.config._experts_implementation
    if os.path.exists(f"{name}_acting.pickle"):
        found[name]["pickled"] = sent_to_another_process(f"{name}_acting", inputs)
torch.save(found, "found.pt")
"""

_TRACE = """
import torch._dynamo

found = {}
for name in names:
    model, inputs = loaded(f"{name}_acting"), {**torch.load(f"{name}.pt"), "use_cache": False}
    with torch.no_grad():
        eager = model(**inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits
        exported = torch.export.export(model, (), inputs).module()(**inputs).logits
    torch._dynamo.reset()
    found[name] = {"compiles": torch.equal(eager, compiled), "exports": torch.equal(eager, exported)}
torch.save(found, "graphs.pt")
"""


def name_of(family: str, method: str) -> str:
    # Transformers calls the package of remote code after the folder.
    return f"{family}_{method}"


def with_noise(folder: Path, output: Path) -> Path:
    """Copy a checkpoint with noise on all tensors; vectors, which may be gates or variances, stay positive or become so."""
    shutil.copytree(folder, output)
    generator = torch.Generator().manual_seed(14)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():
            noise = 0.1 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + noise if tensor.dim() > 1 else tensor + noise.abs()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def inputs_of(method: str) -> dict[str, torch.Tensor]:
    fetched = {"memory_ids": torch.tensor([[1, 4, 13], [-1, -1, -1]])} if method.startswith("hier-") else {}
    return {"input_ids": prompt(), **fetched}


@pytest.fixture(scope="module")
def folder(request, checkpoints, tmp_path_factory) -> Path:
    """Each case as it was made, and with noise on all tensors, with its inputs."""
    folder = tmp_path_factory.mktemp("without")
    for family, method in wanted_by_tests(request, "family", "method"):
        made, name = checkpoints(family, method), name_of(family, method)
        shutil.copytree(made, folder / f"{name}_born")
        with_noise(made, folder / f"{name}_acting")
        torch.save(inputs_of(method), folder / f"{name}.pt")
        if (family, method) in BY_VALUE:
            pickle_by_value(made, folder / f"{name}_acting.pickle")
    return folder


def without_the_package(request: Any, folder: Path, program: str, file: str) -> dict[str, Any]:
    """Run a program on wanted cases in a process without the package, after the functions of `computing`; return what it saved."""
    names = [name_of(*case) for case in wanted_by_tests(request, "family", "method")]
    functions = Path(computing.__file__).read_text(encoding="utf-8")
    run_python(f"{functions}\nnames = {names!r}\n{program}", folder, package_present=False)
    return torch.load(folder / file)


@pytest.fixture(scope="module")
def found(request, folder) -> dict[str, Any]:
    return without_the_package(request, folder, _RUN, "found.pt")


@pytest.fixture(scope="module")
def graphs(request, folder) -> dict[str, dict[str, bool]]:
    """Return for each traced model whether its graphs compute what the model does, in a process without the package."""
    return without_the_package(request, folder, _TRACE, "graphs.pt")


def pickle_by_value(checkpoint: Path, path: Path) -> None:
    """Write the classes of the module that a checkpoint carries as engines send them to their workers."""
    module = imported(checkpoint)
    cloudpickle.register_pickle_by_value(module)
    (model,) = (name for name in vars(module) if name.startswith("Midus") and name.endswith("ForCausalLM"))
    names = {"config": model.replace("ForCausalLM", "Config"), "model": model}
    path.write_bytes(cloudpickle.dumps({kind: getattr(module, name) for kind, name in names.items()}))
    cloudpickle.unregister_pickle_by_value(module)


def with_the_package(folder: Path) -> Any:
    model = computing.loaded(folder)
    assert type(model).__module__.startswith("midus_hf.")
    return model


@pytest.mark.parametrize(("family", "method"), [*CASES, *ON_LLAMA, *INFERRED])
def test_module_computes_what_the_package_does(family, method, folder, found):
    assert found["absent"] == [True] * 2
    name = name_of(family, method)
    there = found[name]["acting"]
    (module,) = found[name]["modules"]
    assert module.endswith(".modeling_midus")
    # Saved without the package, in shards, it has the same code and record, and is loaded with the package.
    saved, again = folder / f"{name}_born", folder / f"{name}_again"
    assert [path.read_text() for path in again.glob("*.py")] == [(saved / "modeling_midus.py").read_text()]
    model = with_the_package(again)
    assert model.config.upscale == json.loads((saved / "config.json").read_text())["upscale"]
    assert found[name]["experts"] == model.config._experts_implementation
    born = computing.logits_of(model, inputs_of(method))
    assert torch.equal(found[name]["born"], born)
    here = computing.computed(with_the_package(folder / f"{name}_acting"), inputs_of(method))
    torch.testing.assert_close(there["logits"], here["logits"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(here["logits"], born, atol=1e-2)
    assert torch.equal(here["tokens"], there["tokens"])
    assert torch.equal(here["beams"], there["beams"])
    torch.testing.assert_close(there["loss"], here["loss"], rtol=1e-5, atol=1e-5)
    assert here["reached"] == there["reached"]
    assert here["reached"]


@pytest.mark.parametrize(("family", "method"), BY_VALUE)
def test_classes_sent_by_value_compute_the_same(family, method, found):
    result = found[name_of(family, method)]
    assert torch.equal(result["pickled"], result["acting"]["logits"])


@pytest.mark.parametrize(("family", "method"), TRACED)
def test_whole_model_compiles_and_exports_as_one_graph(family, method, graphs):
    assert graphs[name_of(family, method)] == {"compiles": True, "exports": True}
