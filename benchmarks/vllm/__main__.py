"""Serve upscaled models with vLLM: greedy tokens that Transformers chooses too, and tokens per second.

    python -m benchmarks.vllm --python .venv-vllm/bin/python --work outputs/vllm
    python -m benchmarks.vllm --python .venv-vllm/bin/python --work outputs/vllm --families qwen3 --methods moc,solar

Bases are SmolLM2-135M-Instruct (`llama`), and small Qwen3 and Gemma 3 models with random weights. Each method's result, in which
no new tensor is zero, answers prompts of mixed lengths, which vLLM batches. vLLM runs methods with memory with its
Transformers backend and the code in the checkpoint (`engram` with this package), and other models with its native classes. A token
counts as `equal` if Transformers chooses the token after the same tokens, as `tie` if its logit is less than 1e-4 below the largest,
and as `different` otherwise. `changed` counts the tokens that the base would not choose. Rates are compared with the base's, and
with LLaMA-Pro's, both by the same engine in the same run; `eager` is without vLLM's compilation.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measuring import RESULTS, Row, add_list, command_line, run_columns, tell
from benchmarks.vllm.comparison import (
    BASES,
    DENSE_METHODS,
    MEMORY_METHODS,
    PACKAGE_METHODS,
    agreement,
    generate,
    load,
    upscaled,
)

COLUMNS = {name: f"{{{name}}}" for name in ("family", "method", "tokens", "equal", "ties", "different", "changed")}
COLUMNS |= {"tokens/s": "{rate:.0f}", "of the base's": "{of_base:.2f}", "of LLaMA-Pro's": "{of_llama_pro:.2f}"}
COLUMNS |= {"load, s": "{load_seconds:.0f}"}


def main() -> None:
    """Compare each chosen method on each chosen family."""
    parser = command_line(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with vLLM")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints, which are kept")
    add_list(parser, "--families", BASES)
    add_list(parser, "--methods", (*MEMORY_METHODS, *PACKAGE_METHODS, *DENSE_METHODS))
    parser.add_argument("--prompts", type=int, default=40, help="prompts of a batch (default: 40)")
    parser.add_argument("--tokens", type=int, default=250, help="tokens that follow each prompt (default: 250)")
    parser.add_argument(
        "--compiled", action="store_true", help="with vLLM's compilation, which takes a minute per model"
    )
    arguments = parser.parse_args()
    if not os.access(arguments.python, os.X_OK):
        parser.error(
            f"--python is {str(arguments.python)!r}, which cannot be run; expected the Python of an environment with vLLM."
        )
    arguments.work.mkdir(parents=True, exist_ok=True)
    tell(_rows(arguments), COLUMNS, None if arguments.no_append else RESULTS / "vllm.csv", run_columns())


def _rows(arguments: Any) -> Iterator[Row]:
    options = {"enforce_eager": not arguments.compiled}
    for family in arguments.families:
        folder = arguments.work / family
        folder.mkdir(exist_ok=True)
        base = BASES[family](folder / "base")
        base_model = load(base)
        prompts = mixed_prompts(base_model.config.vocab_size, arguments.prompts)
        rates: dict[str, float] = {}
        methods = ["base", "llama-pro", *(each for each in arguments.methods if each != "llama-pro")]
        for method in methods:
            model = base if method == "base" else folder / method
            if not model.exists():
                upscaled(base, method, model)
            backend = "transformers" if method in (*MEMORY_METHODS, *PACKAGE_METHODS) else "auto"
            answers = generate(
                arguments.python.absolute(),
                model.absolute(),
                prompts,
                arguments.tokens,
                folder.absolute(),
                model_impl=backend,
                package=method in PACKAGE_METHODS,
                **options,
            )
            counts = agreement(load(model), prompts, answers.tokens)
            by_base = agreement(base_model, prompts, answers.tokens)
            rates[method] = answers.rate
            yield {
                "family": family,
                "method": method,
                "backend": backend,
                "compiled": arguments.compiled,
                **counts._asdict(),
                "different": counts.different,
                "changed": by_base.different,
                "rate": answers.rate,
                "of_base": answers.rate / rates["base"],
                "of_llama_pro": answers.rate / rates.get("llama-pro", float("nan")),
                "load_seconds": answers.load_seconds,
            }


def mixed_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Return random prompts of 4 to 200 tokens; the second half begins like the first half, for the prefix cache."""
    generator = random.Random(0)
    lengths = [generator.randint(4, 200) for _ in range((count + 1) // 2)]
    first = [[generator.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    second = [prompt[: 3 * len(prompt) // 4] + [generator.randrange(3, vocab_size)] for prompt in first]
    return (first + second)[:count]


if __name__ == "__main__":
    sys.exit(main())
