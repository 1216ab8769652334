"""What a bank learns of facts: meanings of nouns, read once by blocks of their topic, by a generic memory, or not at all.

    python -m experiments.topics --work outputs/topics --tree outputs/glosses-tree
    python -m experiments.topics --work outputs/topics --glosses 40000 --rates 1e-3,3e-4

The model is SmolLM2-135M, frozen, with FFN memories (`hier-ffn`). The variant `fetched` reads the blocks on each text's
path in a tree of topics. The variant `generic` reads one memory for all texts, as large as what `fetched` fetches. Both
are trained on meanings of nouns (WordNet), each read once. The losses are measured on meanings that were trained on, on
other meanings, and on Wikipedia articles, one document at a time, with the blocks on its path. Losses are in nats per
token, and `rate` is 0 for the base. Every step is a command that a person could type, and is skipped if its folder
exists. Without `--tree` the tree is built first, which takes about a quarter of an hour on one core.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import OF_BLOCKS, loss_of, results_of, run_command, study, train_once, upscale_once
from material.articles import articles
from material.glosses import glosses
from material.minilm import minilm
from material.smollm2 import smollm2_135m

# Option `without_ids` (what a text without a path reads), and share of sequences that train the generic memory.
VARIANTS = {"fetched": ("none", 0.0), "generic": ("generic", 1.0)}

_HELD_OUT = 10


def main() -> None:
    parser = study(__doc__)
    parser.add_argument("--tree", type=Path, help="tree of topics of the glosses (default: it is built)")
    listed(parser, "--variants", VARIANTS)
    parser.add_argument("--glosses", type=int, default=8000, help="meanings, spread evenly over all (default: 8000)")
    parser.add_argument("--sizes", default="[32,8,0]", help="of blocks (default: [32,8,0])")
    listed(parser, "--rates", ("1e-3",))
    listed(parser, "--seeds", (0,))
    parser.add_argument("--max-tokens", type=int, default=8192, help="of each text that is measured (default: 8192)")
    arguments = parser.parse_args()
    columns = {
        "model": "{variant}",
        "rate": "{rate:g}",
        "seed": "{seed}",
        "trained on": "{trained_loss:.4f}",
        "held out": "{held_out_loss:.4f}",
        "articles": "{articles_loss:.4f}",
    }
    tell(_rows(arguments), columns, results_of("topics", arguments), run_columns())


def _embedding() -> list[Any]:
    return ["--embedding-model", minilm(), "--tokenizer", minilm()]


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tree = arguments.tree or work / "tree"
    if not (tree / "tree.json").is_file():
        flags = ["--corpus", glosses(), *_embedding(), "--levels", 3, "--output", tree]
        run_command("midus cluster", "build", *flags)
    train, held_out = _assigned(work, tree, arguments.glosses)
    texts = {"trained_loss": train, "held_out_loss": held_out, "articles_loss": articles()}

    def row(model: Path, variant: str, rate: float, seed: int, counts: dict[str, int]) -> Row:
        # A text without a path reads the generic memory.
        fetching = ["--retriever", tree] if variant != "generic" else ["--set", "apart=true"]
        flags = ["--sequence-length", 256, "--max-tokens", arguments.max_tokens, *fetching]
        return {
            "variant": variant,
            "glosses": arguments.glosses,
            "rate": rate,
            "seed": seed,
            "fetched_parameters": counts.get("fetched", 0),
            "bank_parameters": counts.get("bank", 0),
            **{name: loss_of(model, text, *flags) for name, text in texts.items()},
        }

    yield row(smollm2_135m(), "base", 0.0, 0, {})
    for variant in arguments.variants.split(","):
        without_ids, share = VARIANTS[variant]
        for seed in map(int, arguments.seeds.split(",")):
            upscaled = work / f"{variant}-{seed}"
            options = {"sizes": arguments.sizes, "without_ids": without_ids}
            counts = upscale_once(upscaled, smollm2_135m(), "hier-ffn", seed, **options)
            for rate in arguments.rates.split(","):
                trained = work / f"{upscaled.name}-{arguments.glosses}-{rate}"
                settings = {
                    "model_name_or_path": upscaled,
                    "corpus": {"path": str(train), "path_column": "memory_ids"},
                    **OF_BLOCKS,
                    "generic_share": share,
                    "value_learning_rate": float(rate),
                    "per_device_train_batch_size": 8,
                    "num_train_epochs": 1,
                    "seed": seed,
                }
                train_once(trained, settings)
                yield row(trained, variant, float(rate), seed, counts)


def _assigned(work: Path, tree: Path, count: int) -> tuple[Path, Path]:
    """Assign paths to a sample of meanings; return the files to train on and, with every tenth meaning, held out."""
    train, held_out = (work / f"{name}-{count}.jsonl" for name in ("train", "held-out"))
    if not held_out.is_file():
        every = glosses().read_text(encoding="utf-8").splitlines(keepends=True)
        chosen, assigned = work / f"glosses-{count}.jsonl", work / f"assigned-{count}.jsonl"
        chosen.write_text("".join(every[index * len(every) // count] for index in range(count)), encoding="utf-8")
        flags = ["--corpus", chosen, "--output", assigned, "--overwrite", *_embedding()]
        run_command("midus cluster", "assign", "--tree", tree, *flags)
        lines = assigned.read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join(line for number, line in enumerate(lines) if number % _HELD_OUT), encoding="utf-8")
        held_out.write_text("".join(lines[::_HELD_OUT]), encoding="utf-8")
    return train, held_out


if __name__ == "__main__":
    main()
