"""What memories that read the tokens before cost in vLLM: tokens per second of the base, `engram` and `packs`.

    python -m benchmarks.vllm.names --python .venv-vllm/bin/python --work outputs/vllm-names

16 prompts of about 15 tokens are answered with 32 tokens each in one batch by SmolLM2-135M-Instruct in float32, several times, by
vLLM's Transformers backend without compilation. `named` of them name an entry of the glossary of 118 elements. Models answer in turn,
in one process; the first run, in which packs are read, is not counted. Rates are medians, and compared with the base's by medians of
quotients of neighbouring runs, by the clock and by processor time. `equal` counts the tokens that Transformers would choose, of all
runs.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.measuring import Row, add_list, command_line, tell
from benchmarks.vllm.comparison import BASES, agreement, generate_by_turns, load, upscaled
from material.elements import elements
from upscalers.runs.upscale import upscale

COLUMNS = {"model": "{model}", "named": "{named}", "tokens": "{tokens}", "equal": "{equal}"}
COLUMNS |= {"tokens/s": "{rate:.0f}", "of the base's": "{of_base:.2f}", "by processor time": "{of_base_cpu:.2f}"}
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
    add_list(parser, "--models", ("packs", "engram"))
    add_list(parser, "--named", ("0", "8", "16"))
    arguments = parser.parse_args()
    tell(_rows(arguments), COLUMNS, None, {})


def _rows(arguments: Any) -> Iterator[Row]:
    python = arguments.python.absolute()
    work = arguments.work.absolute()
    runs = arguments.runs
    work.mkdir(parents=True, exist_ok=True)
    base = BASES["llama"](work)
    # The base last: what vLLM changes in Transformers for it would change how the others are made.
    folders = {**{name: work / name for name in arguments.models}, "base": base}
    if "engram" in folders and not folders["engram"].exists():
        upscaled(base, "engram", folders["engram"])
    if "packs" in folders and not folders["packs"].exists():
        options = {"corpus": str(elements() / "facts.jsonl"), "common_names": True}
        upscale(base=base, method="packs", options=options, output=folders["packs"], verify=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for named in map(int, arguments.named):
        words = (*NAMES[:named], *PLACES[named:])
        prompts = [
            tokenizer(f"Tell me about the {word}.\nOf the {word} one knows that")["input_ids"] for word in words
        ]
        engine = {"package": True, "enable_prefix_caching": False}
        all_answers = generate_by_turns(python, [*folders.values()], prompts, 32, work, runs=runs, **engine)
        of_base = all_answers[-1]
        for (model, folder), answers in zip(folders.items(), all_answers, strict=True):
            counts = agreement(load(folder), prompts * runs, answers.tokens)
            yield {
                "model": model,
                "named": named,
                **counts._asdict(),
                "rate": statistics.median(answers.rates[1:]),
                "of_base": _quotient(of_base.seconds, answers.seconds),
                "of_base_cpu": _quotient(of_base.cpu_seconds, answers.cpu_seconds),
            }


def _quotient(of_base: list[float], seconds: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(of_base[1:], seconds[1:], strict=True))


if __name__ == "__main__":
    sys.exit(main())
