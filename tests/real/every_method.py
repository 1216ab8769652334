"""Every method on a real model, `make test-real`: identity, greedy tokens with and without the package, strip; seconds and memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from carried import computing
from models.fresh_process import run_python
from transformers import AutoConfig

import upscalers.methods  # noqa: F401 - fills the table
from material.fetch import FETCH
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.options import block_layouts
from tests.upscalers.contents import file_digests
from upscalers.methods.contract import METHODS

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("MODEL", "smollm2")
GLOSSARY = {"name": "Kestrel gateway", "text": "The Kestrel gateway listens on port 8443."}
# The first opens no entry of the glossary.
TEXTS = ["The capital of France is", "The Kestrel gateway\nThe Kestrel gateway listens on port"]
COLUMNS = {
    "method": "{}",
    "max_abs_diff": "{:.3g}",
    "upscale_seconds": "{:.1f}",
    "upscale_peak_gb": "{:.2f}",
    "tokens_seconds": "{:.1f}",
    "tokens_peak_gb": "{:.2f}",
    "strip_seconds": "{:.1f}",
}

_TOKENS = """
import json
from transformers import AutoTokenizer

def greedy_tokens(inputs):
    return model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, -8:].tolist()

model, tokenizer = loaded(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
record = getattr(model.config, "upscale", {})
born, named = (dict(tokenizer(text, return_tensors="pt")) for text in texts)
tokens = [greedy_tokens(born)]
before = logits_of(model, named)
if levels:
    named["memory_ids"] = torch.zeros(1, levels, dtype=torch.long)
new = [f".layers.{layer}." for layer in record.get("new_layers", [])]
new += [f".{part}.{name}." for name in record.get("new_memories", []) for part in ("memories", "memory_tables")]
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if any(part in name for part in new):
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
tokens.append(greedy_tokens(named))
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
changed = bool((logits_of(model, named) != before).any())
print(json.dumps({"tokens": tokens, "changed": changed, "module": type(model).__module__, "peak_gb": int(peak) * 1024 / 1e9}))
"""


@pytest.fixture(scope="module")
def base() -> Path:
    return FETCH[MODEL]()


@pytest.fixture(scope="module")
def rows() -> Any:
    """What was measured of each method: a table on standard output, and a file of JSON."""
    rows: list[dict[str, Any]] = []
    yield rows
    output = ROOT / "outputs" / "real" / f"{MODEL}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    lines = [[cell.format(row[column]) for column, cell in COLUMNS.items()] for row in rows]
    print("", *(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *lines]), output, sep="\n")


@pytest.fixture(scope="module")
def tokens_of_base(base, tmp_path_factory) -> list[int]:
    """The tokens that the base writes behind the first text."""
    return generated(base, tmp_path_factory.mktemp("base"), package_present=False)["tokens"][0]


def generated(folder: Path, work: Path, *, package_present: bool, levels: int = 0) -> dict[str, Any]:
    """Greedy tokens behind the first text as the model was made, and behind the second with noise in all that is new."""
    names = f"folder, texts, levels = {str(folder)!r}, {TEXTS!r}, {levels}\n"
    functions = Path(computing.__file__).read_text(encoding="utf-8")
    imports = "import midus_hf\n" if package_present else ""
    return json.loads(run_python(imports + functions + names + _TOKENS, work, package_present=package_present))


def run_upscale(*words: str | Path) -> Any:
    """Run the command in a process of its own; return what it reports."""
    command = [Path(sys.executable).with_name("upscale"), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def options_of(method: str, base: Path, work: Path) -> dict[str, Any]:
    """The options that a method lacks a default for."""
    (work / "glossary.jsonl").write_text(json.dumps(GLOSSARY), encoding="utf-8")
    layers = json.loads((base / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    return {
        "packs": {"corpus": str(work / "glossary.jsonl")},
        "stack": {"layers": [f"0-{layers - 1}", f"{layers // 2}-{layers - 1}"]},
    }.get(method, {})


def fill_blocks(folder: Path) -> int:
    """Write noise into a block of each level of a model's bank, if it has one; return the number of levels of a path."""
    config = AutoConfig.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    layouts = block_layouts(config.memories()) if hasattr(config, "memories") else {}
    for name, layout in layouts.items():
        bank = MemoryBank(folder / BANKS_FOLDER / name, layout)
        for level in layout.levels:
            bank.write(level, 0, 0.02 * torch.randn(layout.record_numel(level), generator=generator))
    return max((len(layout.blocks.levels) for layout in layouts.values()), default=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_real_model_by_every_method(method, base, tokens_of_base, rows, tmp_path):
    made, stripped = tmp_path / "made", tmp_path / "stripped"
    options = [f"--set={key}={json.dumps(value)}" for key, value in options_of(method, base, tmp_path).items()]
    report = run_upscale("--base", base, "--method", method, "--output", made, *options)
    promised = json.loads((made / "upscale.json").read_text(encoding="utf-8"))["promises_identity"]
    assert report["identity"]["max_abs_diff"] == 0 or not promised

    levels = fill_blocks(made)
    started = time.perf_counter()
    here = generated(made, tmp_path, package_present=True, levels=levels)
    seconds = time.perf_counter() - started
    assert here["tokens"][0] == tokens_of_base or not promised
    there = generated(made, tmp_path, package_present=False, levels=levels)
    assert there["tokens"] == here["tokens"]
    assert here["changed"] or method == "packs"
    assert there["module"].startswith("transformers_modules.") == here["module"].startswith("midus_hf.")

    result = run_upscale("strip", made, "--output", stripped)
    assert result["base_confirmed"]
    weights = [
        {name: digest for name, digest in file_digests(folder).items() if name.endswith(".safetensors")}
        for folder in (base, stripped)
    ]
    assert weights[0] == weights[1]
    rows.append(
        {
            "method": method,
            "max_abs_diff": report["identity"]["max_abs_diff"],
            "upscale_seconds": report["seconds"],
            "upscale_peak_gb": report["peak_rss_bytes"] / 1e9,
            "tokens_seconds": seconds,
            "tokens_peak_gb": here["peak_gb"],
            "strip_seconds": result["seconds"],
        }
    )
