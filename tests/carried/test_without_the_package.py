"""Checkpoints load and compute with the code that they carry, in a process that can import nothing of this project."""

import json
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from carried import computing
from carried.made import CASES, KINDS
from carried.test_module import imported
from models.fresh_process import run_python
from pairs import wanted_by_tests
from safetensors.torch import load_file, save_file
from tiny import prompt

# Those whose whole model is traced: a memory in a layer of its own, and two that are attached, of which one carries
# slots.
TRACED = [("llama", method) for method in ("midus-hml", "moda", "moc")]

ON_LLAMA = [("llama", kind) for kind in KINDS]

# Methods whose module registers an attention function with transformers, so that it has to be imported where its
# models run.
READ_BY_ATTENTION = ("hier-kv", "hier-lora-qk", "hier-lora-vo", "moda")

_RUN = """
import json
import os
import sys
import cloudpickle
import torch._dynamo

def is_absent(name):
    try:
        __import__(name)
    except ModuleNotFoundError:
        return True

def traced(model, inputs):
    with torch.no_grad():
        eager = model(**inputs, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False).logits
        exported = torch.export.export(model, (), {**inputs, "use_cache": False}).module()(**inputs, use_cache=False).logits
    torch._dynamo.reset()
    return {"compiles": torch.equal(eager, compiled), "exports": torch.equal(eager, exported)}

def sent_to_another_process(name, inputs):
    classes = cloudpickle.loads(open(f"{name}.pickle", "rb").read())
    with torch.no_grad():
        model = classes["model"].from_pretrained(name, config=classes["config"].from_pretrained(name)).eval()
        return model(**inputs).logits

findings = {"absent": [is_absent(name) for name in ("midus_hf", "upscalers")]}
for name in json.load(open("names.json")):
    inputs = torch.load(f"{name}.pt")
    models = {kind: loaded(f"{name}_{kind}") for kind in ("born", "acting")}
    package = type(models["born"]).__module__.rpartition(".")[0]
    findings[name] = {"modules": [module for module in sys.modules if module.startswith(package + ".")]}
    if name in json.load(open("traced.json")):
        findings[name] |= traced(models["acting"], inputs)
    results = {kind: computed(model, inputs) for kind, model in models.items()}
    if os.path.exists(f"{name}_acting.pickle"):
        results["pickled"] = sent_to_another_process(f"{name}_acting", inputs)
    torch.save(results, f"{name}_found.pt")
print(json.dumps(findings))
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
    """What a process without the package found of each case, which has it as it was made, and with noise on all tensors."""
    folder = tmp_path_factory.mktemp("without")
    names = []
    for family, method in wanted_by_tests(request, "family", "method"):
        made, name = checkpoints(family, method), name_of(family, method)
        shutil.copytree(made, folder / f"{name}_born")
        with_noise(made, folder / f"{name}_acting")
        torch.save(inputs_of(method), folder / f"{name}.pt")
        if method not in READ_BY_ATTENTION:
            pickle_by_value(made, folder / f"{name}_acting.pickle")
        names.append(name)
    (folder / "names.json").write_text(json.dumps(names))
    (folder / "traced.json").write_text(json.dumps([name_of(*case) for case in TRACED]))
    program = Path(computing.__file__).read_text(encoding="utf-8") + _RUN
    printed = run_python(program, folder, package_present=False)
    (folder / "findings.json").write_text(printed.splitlines()[-1])
    return folder


def pickle_by_value(checkpoint: Path, path: Path) -> None:
    """Write the classes of the module that a checkpoint carries as engines send them to their workers."""
    module = imported(checkpoint)
    cloudpickle.register_pickle_by_value(module)
    kinds = {"config": "Config", "model": "ForCausalLM"}
    (family,) = (
        name.removesuffix("ForCausalLM")
        for name in vars(module)
        if name.startswith("Midus") and name.endswith("ForCausalLM")
    )
    path.write_bytes(cloudpickle.dumps({kind: getattr(module, family + suffix) for kind, suffix in kinds.items()}))
    cloudpickle.unregister_pickle_by_value(module)


def findings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "findings.json").read_text())


def results(folder: Path, family: str, method: str) -> dict[str, Any]:
    return torch.load(folder / f"{name_of(family, method)}_found.pt")


def with_the_package(folder: Path, kind: str, family: str, method: str) -> dict[str, Any]:
    model = computing.loaded(folder / f"{name_of(family, method)}_{kind}")
    assert type(model).__module__.startswith("midus_hf.")
    return computing.computed(model, inputs_of(method))


@pytest.mark.parametrize(("family", "method"), [*CASES, *ON_LLAMA])
def test_the_module_alone_computes_what_the_package_does(family, method, folder):
    assert findings(folder)["absent"] == [True] * 2
    (module,) = findings(folder)[name_of(family, method)]["modules"]
    assert module.endswith(".modeling_midus")
    result = results(folder, family, method)
    born, acting = (with_the_package(folder, kind, family, method) for kind in ("born", "acting"))
    assert torch.equal(result["born"]["logits"], born["logits"])
    torch.testing.assert_close(result["acting"]["logits"], acting["logits"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(acting["logits"], born["logits"], atol=1e-2)
    for here, there in ((born, result["born"]), (acting, result["acting"])):
        assert torch.equal(here["tokens"], there["tokens"])
        assert torch.equal(here["beams"], there["beams"])
        torch.testing.assert_close(there["loss"], here["loss"], rtol=1e-5, atol=1e-5)
        assert here["reached"] == there["reached"] and here["reached"]


@pytest.mark.parametrize(
    ("family", "method"), [case for case in CASES if getattr(case, "values", case)[1] not in READ_BY_ATTENTION]
)
def test_its_classes_compute_the_same_where_they_were_sent_by_value(family, method, folder):
    result = results(folder, family, method)
    assert torch.equal(result["pickled"], result["acting"]["logits"])


@pytest.mark.parametrize(("family", "method"), TRACED)
def test_a_whole_model_is_one_graph_to_compile_and_to_export(family, method, folder):
    result = findings(folder)[name_of(family, method)]
    assert result["compiles"] and result["exports"]
