"""Atomic numbers: what blocks learn of a fact about each of 118 elements, and how much remains while blocks are blocked.

    python -m experiments.atoms --work outputs/atoms --picture outputs/atoms/blocking.png
    python -m experiments.atoms --work outputs/atoms --variants fetched --blocked 1:0,1:1,1:2,1:4,1:8

The model is SmolLM2-135M, frozen, with FFN memories (`hier-ffn`). The variant `fetched` reads the blocks on each text's
path in a tree of topics. The variant `generic` reads one memory for all texts, as large as what `fetched` fetches. Both
are trained on four sentences for each element (mendeleev), none of them worded like the task `atomic_numbers` (appendix
B). Measured are the accuracy on the task, and the loss on the sentences that its questions and answers make, while the
nodes that a text would fetch first are blocked for that text (figure 6b). Answers are kept in `WORK/answers`, for
`python -m experiments.name_counts`. Every step is a command that a person could type, and training is skipped if its
folder exists.

Losses are in nats per token; rate and epochs are 0 for the base. For each text, `blocked` of the `nodes` nodes of
`level` are blocked. Without `--tree` a tree is built from one sentence for each element. In the tree of a broad corpus
nearly all elements have the same path.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import (
    OF_BLOCKS,
    evaluated,
    read_rows,
    results_of,
    run_command,
    study,
    train_once,
    upscale_once,
    write_rows,
)
from material.elements import FACTS_FILE, QUESTIONS_FILE, elements
from material.minilm import minilm
from material.smollm2 import smollm2_135m

# Option `without_ids` and share of sequences that train the generic memory; None for the base, which is not trained.
#
# `without_ids` says what a text without a path reads.
VARIANTS: dict[str, tuple[str, float] | None] = {"base": None, "fetched": ("none", 0.0), "generic": ("generic", 1.0)}

_METRIC = "exact_match,first-integer"


def main() -> None:
    parser = study(__doc__)
    parser.add_argument("--tree", type=Path, help="tree of topics (default: it is built of the elements)")
    listed(parser, "--variants", VARIANTS)
    parser.add_argument("--sizes", default="[32,16]", help="of blocks, one a level of the tree (default: [32,16])")
    parser.add_argument("--epochs", type=int, default=6, help="times that each sentence is read (default: 6)")
    parser.add_argument("--rate", default="3e-3", help="of blocks (default: 3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of blocks and order (default: 0)")
    what = "LEVEL:COUNT, best nodes that are blocked for each text"
    listed(parser, "--blocked", ("1:0", "2:1", "1:1", "1:2", "1:4"), what)
    parser.add_argument("--picture", type=Path, help="file to draw (default: none)")
    arguments = parser.parse_args()
    if arguments.picture:
        import matplotlib.figure  # noqa: F401 - fails before anything is measured where it is missing

        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "model": "{variant}",
        "blocked for each text": _blocked,
        "accuracy": "{accuracy:.3f}",
        "loss": "{loss:.4f}",
    }
    rows = tell(_rows(arguments), columns, results_of("atoms", arguments), run_columns())
    if arguments.picture:
        draw_blocking(rows, arguments.picture)


def _blocked(row: Row) -> str:
    return f"{row['blocked']} of {row['nodes']} nodes of level {row['level']}" if row["blocked"] else "nothing"


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    work = arguments.work
    (work / "answers").mkdir(parents=True, exist_ok=True)
    facts = elements() / FACTS_FILE
    tree, assigned, sentences = arguments.tree or work / "tree", work / "facts.jsonl", work / "sentences.jsonl"
    embedding = ["--embedding-model", minilm(), "--tokenizer", minilm()]
    if not (tree / "tree.json").is_file():
        texts = {row["name"]: row["text"] for row in reversed(read_rows(facts))}
        first_of_each = write_rows(work / "first-facts.jsonl", [{"text": text} for text in reversed(texts.values())])
        run_command("midus cluster", "build", "--corpus", first_of_each, *embedding, "--levels", 2, "--output", tree)
    if not assigned.is_file():
        run_command("midus cluster", "assign", "--tree", tree, "--corpus", facts, "--output", assigned, *embedding)
    questions = read_rows(elements() / QUESTIONS_FILE)
    write_rows(sentences, [{"text": sentence(row["name"], row["number"])} for row in questions])
    branching = json.loads((tree / "tree.json").read_text(encoding="utf-8"))["branching"]
    for variant in arguments.variants.split(","):
        model, counts, is_trained = smollm2_135m(), {}, VARIANTS[variant] is not None
        if is_trained:
            model, counts = _trained(assigned, variant, branching, arguments)
        # Blocking makes no difference to a model that fetches nothing.
        pairs = [pair.split(":") for pair in arguments.blocked.split(",")] if variant == "fetched" else [("1", "0")]
        for level, blocked in pairs:
            # A text without a path reads the generic memory.
            fetching = (
                ["--retriever", tree, "--block-best", f"{level}:{blocked}"]
                if variant == "fetched"
                else ["--set", "apart=true"]
            )
            answers = work / "answers" / f"{model.name}-{level}-{blocked}.jsonl"
            answers.unlink(missing_ok=True)
            flags = ["--tasks", "atomic_numbers", "--data", elements(), "--set", f"answers={answers}", *fetching]
            measured = evaluated(model, "--sequence-length", 64, "--text", sentences, *flags)
            yield {
                "variant": variant,
                "epochs": arguments.epochs if is_trained else 0,
                "rate": float(arguments.rate) if is_trained else 0.0,
                "seed": arguments.seed,
                "fetched_parameters": counts.get("fetched", 0),
                "bank_parameters": counts.get("bank", 0),
                "level": int(level),
                "nodes": branching ** int(level),
                "blocked": int(blocked),
                "accuracy": measured["tasks"]["atomic_numbers"][_METRIC],
                "loss": math.log(measured["perplexity"]["perplexity"]),
            }


def sentence(name: str, number: int) -> str:
    """Return the sentence that a question and its answer make."""
    return f"The atomic number of {name} is {number}."


def _trained(
    assigned: Path, variant: str, branching: int, arguments: argparse.Namespace
) -> tuple[Path, dict[str, int]]:
    """Return a variant's model, which is upscaled and trained unless it exists, and its parameter counts."""
    without_ids, share = VARIANTS[variant] or ("none", 0.0)
    upscaled = arguments.work / f"{variant}-{arguments.seed}"
    options = {"sizes": arguments.sizes, "branching": branching, "without_ids": without_ids}
    counts = upscale_once(upscaled, smollm2_135m(), "hier-ffn", arguments.seed, **options)
    trained = arguments.work / f"{upscaled.name}-{arguments.epochs}-{arguments.rate}"
    settings = {
        "model_name_or_path": upscaled,
        "corpus": {"path": str(assigned), "path_column": "memory_ids"},
        **OF_BLOCKS,
        "generic_share": share,
        "value_learning_rate": float(arguments.rate),
        "per_device_train_batch_size": 2,
        "num_train_epochs": arguments.epochs,
        "seed": arguments.seed,
    }
    train_once(trained, settings)
    return trained, counts


_PANELS = {"accuracy": "atomic numbers, share that is right", "loss": "loss of the sentence, nats per token"}


def draw_blocking(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and loss by the share of the bank that is blocked for each text."""
    from matplotlib.figure import Figure

    shares = sorted({_share(row) for row in rows})
    figure = Figure(figsize=(10, 4), dpi=120)
    for axes, (measure, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for index, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
            points = sorted((_share(row), row[measure]) for row in rows if row["variant"] == variant)
            if len(points) == 1:
                axes.axhline(points[0][1], linestyle="--", color=f"C{index}", label=variant)
            else:
                # Shares are spaced evenly, since they are powers of the number of children.
                positions = [shares.index(share) for share, _ in points]
                axes.plot(positions, [value for _, value in points], "o-", color=f"C{index}", label=variant)
        axes.set_xticks(range(len(shares)), [str(share) for share in shares])
        axes.set_xlabel("share of the tree that is blocked, best nodes first")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def _share(row: dict[str, Any]) -> Fraction:
    return Fraction(row["blocked"], row["nodes"])


if __name__ == "__main__":
    main()
