"""`python -m demo.checkpoint`: make a small trained checkpoint, SmolLM2-135M with head-wise memory, ready to be pushed to the Hub.

Every step is a command that a person would type; it is printed before it runs.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from demo import BIN, CONFIGS, empty_folder, run
from material.addresses import addresses
from material.excerpts import address_excerpts, article_excerpts
from material.registry import MaterialError

OUTPUT = Path("outputs/checkpoint")
BASE = "HuggingFaceTB/SmolLM2-135M"
# Loads the checkpoint as its users will: by the modules that lie in it, without this package.
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
    output = empty_folder(arguments.output, OUTPUT)
    try:
        corpus = addresses()
        texts = {"held_out_addresses": str(address_excerpts()), "articles": str(article_excerpts())}
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled, model, stripped = output / "upscaled", output / "model", output / "stripped"

    upscale = [BIN / "upscale", "--config", CONFIGS / "upscale" / "demo.yaml", "--base", arguments.base]
    run(*upscale, "--output", upscaled)
    steps = [f"max_steps={arguments.steps}"] if arguments.steps is not None else []
    keys = [f"model_name_or_path={upscaled}", f"output_dir={model}", f"corpus={corpus.train}", *steps]
    measured = [f"eval_text={json.dumps(texts)}", "eval_on_start=true", "eval_steps=0.5"]
    run(BIN / "midus", "train", CONFIGS / "train" / "demo.yaml", *keys, *measured)
    run(sys.executable, "-c", LOADS, model)
    run(BIN / "upscale", "strip", model, "--output", stripped)
    added = (_weight_bytes(model) - _weight_bytes(stripped)) / 1e6
    shutil.rmtree(upscaled)
    shutil.rmtree(stripped)
    print(f"\n{model}: the base with {added:.0f} MB of trained tensors; README.md is its card. To publish it:")
    print(f"    hf upload YOUR_NAME/smollm2-135m-midus-hml {model}")


def _weight_bytes(folder: Path) -> int:
    """Return how many bytes a model's files of weights have."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
