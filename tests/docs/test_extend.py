"""The package of docs/extend.md, word for word: upscaled with, trained, stripped, loaded."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python
from processes.warm import run_warm
from safetensors.torch import load_file
from tiny import prompt, save_tiny_model
from training.tiny_run import letter_tokenizer, write_corpus
from transformers import AutoModelForCausalLM

from tests.docs.snippets import take

FILES = {block.name: block.text for block in take("docs/extend.md", "toml", "python")}
(COMMANDS,) = (block.text for block in take("docs/extend.md", "sh"))


def write_distribution(folder: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    for group, offered in entry_points.items():
        lines = [f"{name} = {value}" for name, value in offered.items()]
        with (info / "entry_points.txt").open("a") as file:
            print(f"[{group}]", *lines, sep="\n", file=file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    installed = tmp_path_factory.mktemp("site-packages")
    for name, text in FILES.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    write_distribution(installed, project["name"], project["entry-points"])
    return installed


@pytest.fixture(scope="module")
def work(tmp_path_factory, installed) -> Path:
    """A folder with a base, where the commands of the page have run, which see the installed package."""
    folder = tmp_path_factory.mktemp("work")
    save_tiny_model("llama", folder / "BASE")
    first, *commands = [shlex.split(command) for command in COMMANDS.strip().splitlines()]
    assert first == ["pip", "install", "."]
    assert {words[0] for words in commands} == {"upscale"}
    code = """
import json, sys
from midus_hf.cli.upscale import main
for words in json.loads(sys.argv[1]):
    if status := main(words):
        sys.exit(status)
"""
    done = run(code, folder, installed, json.dumps([words[1:] for words in commands]))
    assert done.returncode == 0, done.stderr
    return folder


def run(code: str, folder: Path, packages: Path, *words: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(map(str, (packages, Path(__file__).parents[2])))
    return run_warm(code, *words, folder=folder, PYTHONPATH=path)


def test_extension_takes_sixty_lines():
    python = "\n".join(text for name, text in FILES.items() if name.endswith(".py"))
    assert len(FILES) == 4
    assert len([line for line in python.splitlines() if line.strip()]) <= 60


def test_extension_commands_give_the_base_back(work):
    base, again = (work / name / "model.safetensors" for name in ("BASE", "base-again"))
    assert base.read_bytes() == again.read_bytes()


def test_extension_trains_beside_pandas(work, installed):
    letter_tokenizer().save_pretrained(work / "model")
    write_corpus(work / "texts", documents=4)
    words = "texts --model model --output trained --max_steps 2 --sequence_length 32 --bf16 false".split()
    # In an interpreter of its own, since pandas looks for packages when it is imported.
    paths = os.pathsep.join(map(str, (installed, Path(__file__).parents[2])))
    code = "import pandas, runpy; runpy.run_module('midus_hf', run_name='__main__')"
    command = [sys.executable, "-c", code, "train", *words]
    done = subprocess.run(command, cwd=work, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(work / name / "model.safetensors") for name in ("model", "trained"))
    assert {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])} == {"down", "up"}


def test_extension_model_loads_without_packages(work):
    base = AutoModelForCausalLM.from_pretrained(work / "BASE").eval()
    with torch.no_grad():
        torch.save((prompt(), base(prompt()).logits), work / "expected.pt")
    code = """
import torch
from transformers import AutoModelForCausalLM
tokens, logits = torch.load("expected.pt")
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).eval()
with torch.no_grad():
    print(torch.equal(model(tokens).logits, logits))
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            parameter.normal_()
    changed = model(tokens).logits
    print(torch.equal(changed, logits))
    model.save_pretrained("again")
    again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
    print(torch.equal(again(tokens).logits, changed))
"""
    assert run_python(code, work, package_present=False).split() == ["True", "False", "True"]


def test_broken_extensions_are_warnings(work, tmp_path):
    broken = {"broken-memory": "upscalers.methods", "broken-family": "midus_hf.families"}
    for name, group in broken.items():
        write_distribution(tmp_path, name, {group: {"broken": "no_such_module"}})
    code = """
import midus_hf
from midus_hf.cli.upscale import main
from transformers import AutoConfig
print(AutoConfig.for_model("midus_llama").model_type)
print(main(["methods"]), main(["--base", "BASE", "--method", "broken", "--dry-run"]))
"""
    done = run(code, work, tmp_path)
    assert done.stdout.startswith("midus_llama\n")
    assert "midus-hml" in done.stdout
    assert done.stdout.endswith("0 2\n")
    for name, group in broken.items():
        assert f"{name} offers no_such_module under {group}, which cannot be imported" in done.stderr
    assert "method 'broken' is unknown" in done.stderr
    assert "Traceback" not in done.stderr
