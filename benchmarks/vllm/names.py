"""What memories that read the tokens before cost in vLLM: tokens per second of the base, `engram` and `packs`.

    python -m benchmarks.vllm.names --python .venv-vllm/bin/python --work outputs/vllm-names

16 prompts of about 15 tokens are answered with 32 tokens each in one batch by SmolLM2-135M-Instruct in float32, several times, by
vLLM's Transformers backend without compilation. `named` of them name an entry of the glossary of 118 elements. `equal` counts the
tokens that Transformers would choose, of all runs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.measuring import Row, command_line, tell
from benchmarks.vllm.comparison import BASES, agreement, generate, load, upscaled
from material.elements import elements
from upscalers.runs.upscale import upscale

COLUMNS = {"model": "{model}", "named": "{named}", "tokens": "{tokens}", "equal": "{equal}"}
COLUMNS |= {"tokens/s, each run": "{rates}", "best, of the base's": "{of_base:.2f}"}
NAMES = ("iron", "gold", "neon", "xenon", "helium", "carbon", "sodium", "copper")
NAMES += ("silver", "oxygen", "nitrogen", "argon", "calcium", "nickel", "zinc", "iodine")
PLACES = ("north", "south", "west", "east", "city", "village", "harbour", "valley")
PLACES += ("island", "desert", "forest", "market", "castle", "station", "garden", "school")


def main() -> None:
    """Measure each model."""
    parser = command_line(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with vLLM")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints, which are kept")
    parser.add_argument(
        "--runs", type=int, default=4, help="runs of each batch, the first of which warms up (default: 4)"
    )
    arguments = parser.parse_args()
    tell(_rows(arguments.python.absolute(), arguments.work.absolute(), arguments.runs), COLUMNS, None, {})


def _rows(python: Path, work: Path, runs: int) -> Iterator[Row]:
    work.mkdir(parents=True, exist_ok=True)
    base = BASES["llama"](work)
    folders = {"base": base, "engram": work / "engram", "packs": work / "packs"}
    if not folders["engram"].exists():
        upscaled(base, "engram", folders["engram"])
    if not folders["packs"].exists():
        options = {"corpus": str(elements() / "facts.jsonl"), "common_names": True}
        upscale(base=base, method="packs", options=options, output=folders["packs"], verify=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rate_of_base = 0.0
    for model, named in (("base", 8), ("engram", 8), ("packs", 0), ("packs", 8), ("packs", 16)):
        words = (*NAMES[:named], *PLACES[named:])
        prompts = [
            tokenizer(f"Tell me about the {word}.\nOf the {word} one knows that")["input_ids"] for word in words
        ]
        options = {"package": model != "base", "enable_prefix_caching": False}
        answers = generate(python, folders[model], prompts, 32, work, runs=runs, **options)
        counts = agreement(load(folders[model]), prompts * runs, answers.tokens)
        best = max(answers.rates[1:])
        rate_of_base = rate_of_base or best
        yield {
            "model": model,
            "named": named,
            **counts._asdict(),
            "rates": " ".join(f"{rate:.1f}" for rate in answers.rates[1:]),
            "of_base": best / rate_of_base,
        }


if __name__ == "__main__":
    sys.exit(main())
