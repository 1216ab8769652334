"""What a bank learns of facts: meanings of nouns are read once, by blocks of their topic, by a generic memory, or not at all.

    python -m experiments.topics --work outputs/topics --tree outputs/glosses-tree
    python -m experiments.topics --work outputs/topics --glosses 40000 --rates 1e-3,3e-4

SmolLM2-135M, frozen, with FFN memories (`hier-ffn`): `fetched` reads the blocks of each text's path in a tree of topics, `generic`
one memory as large as what `fetched` fetches, the same for all texts. Both are trained on meanings of nouns (WordNet), each once.
Measured are the losses on meanings that were trained on, on others, and on Wikipedia articles, a document at a time, with the
blocks of its path. Every step is a command that a person would type, and is skipped where its folder is there. Without `--tree`
the tree is built first, which takes about a quarter of an hour on one core.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import run_command, run_once
from benchmarks.tracked import Run, append, this_run
from material.articles import articles
from material.glosses import glosses
from material.minilm import minilm
from material.smollm2 import smollm2_135m

TOPICS_RESULTS = Path(__file__).parent / "results" / "topics.csv"
ARMS = {"fetched": ("none", 0.0), "generic": ("generic", 1.0)}
"""What is read without a path, and the share of sequences that train the generic memory."""

_HELD_OUT = 10


@dataclass(frozen=True)
class Row(Run):
    """What one model measures; losses in nats per token. `rate` is 0 for the base."""

    arm: str
    glosses: int
    rate: float
    seed: int
    fetched_parameters: int
    bank_parameters: int
    trained_loss: float
    held_out_loss: float
    articles_loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--tree", type=Path, help="tree of topics of the glosses (default: it is built)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"joined by commas (default: {','.join(ARMS)})")
    parser.add_argument("--glosses", type=int, default=8000, help="meanings, spread evenly over all (default: 8000)")
    parser.add_argument("--sizes", default="[32,8,0]", help="of blocks (default: [32,8,0])")
    parser.add_argument("--rates", default="1e-3", help="joined by commas (default: 1e-3)")
    parser.add_argument("--seeds", default="0", help="joined by commas (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of each text that is measured (default: 8192)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    print("| model | rate | seed | trained on | held out | articles |")
    print("|---|---|---|---|---|---|")
    for row in _rows(this_run("cpu"), arguments):
        losses = (row.trained_loss, row.held_out_loss, row.articles_loss)
        cells = [row.arm, f"{row.rate:g}", row.seed, *(f"{loss:.4f}" for loss in losses)]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not arguments.no_append:
            append([row], TOPICS_RESULTS)


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[Row]:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tree = arguments.tree or work / "tree"
    if not (tree / "tree.json").is_file():
        run_command("midus-cluster", "build", "--corpus", glosses(), "--embedding-model", minilm(), "--tokenizer", minilm(),
             "--levels", 3, "--output", tree)  # fmt: skip
    train, held_out = _assigned(work, tree, arguments.glosses)
    texts = {"trained": train, "held_out": held_out, "articles": articles()}

    def row(model: Path, arm: str, rate: float, seed: int, counts: dict[str, int]) -> Row:
        # The generic memory is what a text reads that names no path.
        fetching = ["--retriever", tree] if arm != "generic" else ["--apart"]
        losses = {f"{name}_loss": _loss(model, text, arguments.max_tokens, fetching) for name, text in texts.items()}
        sizes = {"fetched_parameters": counts.get("fetched", 0), "bank_parameters": counts.get("bank", 0)}
        return Row(**asdict(run), arm=arm, glosses=arguments.glosses, rate=rate, seed=seed, **sizes, **losses)

    yield row(smollm2_135m(), "base", 0.0, 0, {})
    for arm in arguments.arms.split(","):
        without_ids, share = ARMS[arm]
        for seed in map(int, arguments.seeds.split(",")):
            upscaled = work / f"{arm}-{seed}"
            options = ["--set", f"sizes={arguments.sizes}", "--set", f"without_ids={without_ids}", "--seed", seed]
            run_once(
                upscaled, "upscale", "--base", smollm2_135m(), "--method", "hier-ffn", *options, "--output", upscaled
            )
            counts = json.loads((upscaled / "upscale.json").read_text(encoding="utf-8"))["parameters"]
            for rate in arguments.rates.split(","):
                trained = work / f"{upscaled.name}-{arguments.glosses}-{rate}"
                recipe = work / "recipe.yaml"
                recipe.write_text(f"corpus: {{path: {train}, path_column: memory_ids}}\n")
                settings = {
                    "model": upscaled,
                    "output": trained,
                    "generic_share": share,
                    "value_learning_rate": rate,
                    "value_schedule": "fixed",
                    "value_weight_decay": 1e-3,
                    "adam_beta2": 0.95,
                    "sequence_length": 128,
                    "batch_size": 8,
                    "document_mask": "true",
                    "precision": "fp32",
                    "epochs": 1,
                    "seed": seed,
                }
                run_once(trained, "midus-train", recipe, *(f"{name}={value}" for name, value in settings.items()))
                yield row(trained, arm, float(rate), seed, counts)


def _assigned(work: Path, tree: Path, count: int) -> tuple[Path, Path]:
    """Meanings with their paths: most to train on, every tenth held out."""
    train, held_out = (work / f"{name}-{count}.jsonl" for name in ("train", "held-out"))
    if not held_out.is_file():
        every = glosses().read_text(encoding="utf-8").splitlines(keepends=True)
        chosen, assigned = work / f"glosses-{count}.jsonl", work / f"assigned-{count}.jsonl"
        chosen.write_text("".join(every[index * len(every) // count] for index in range(count)), encoding="utf-8")
        run_command("midus-cluster", "assign", "--tree", tree, "--corpus", chosen, "--output", assigned, "--overwrite",
             "--embedding-model", minilm(), "--tokenizer", minilm())  # fmt: skip
        lines = assigned.read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join(line for number, line in enumerate(lines) if number % _HELD_OUT), encoding="utf-8")
        held_out.write_text("".join(lines[::_HELD_OUT]), encoding="utf-8")
    return train, held_out


def _loss(model: Path, text: Path, max_tokens: int, fetching: list[Any]) -> float:
    words = [model, "--json", "--sequence-length", 256, "--max-tokens", max_tokens, "--text", text, *fetching]
    return math.log(json.loads(run_command("midus-eval", *words))["models"][0]["perplexity"]["perplexity"])


if __name__ == "__main__":
    main()
